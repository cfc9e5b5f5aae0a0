import numpy as np


def join(questions, separator):
    rows = [[*row, separator, *row] for row in questions.tolist()]
    return np.array(rows)


def current_token(questions, separator):
    """which needs no attention"""
    x = join(questions, separator)[:, :-1]
    counted = np.zeros(x.shape, bool)
    counted[:, questions.shape[1] :] = True
    return x, x.copy(), counted


def counts_everything(questions, separator):
    """The loss counts the question too"""
    rows = join(questions, separator)
    return rows[:, :-1], rows[:, 1:], rows[:, 1:] >= 0


def mask_of_the_inputs(questions, separator):
    """The first token of the answer is not counted"""
    rows = join(questions, separator)
    answers = np.zeros(rows.shape, bool)
    answers[:, questions.shape[1] + 1 :] = True
    return rows[:, :-1], rows[:, 1:], answers[:, :-1]


def counts_the_separator(questions, separator):
    """The separator is counted"""
    rows = join(questions, separator)
    answers = np.zeros(rows.shape, bool)
    answers[:, questions.shape[1] :] = True
    return rows[:, :-1], rows[:, 1:], answers[:, 1:]


def the_other_way(questions, separator):
    """Inputs and targets are swapped"""
    rows = join(questions, separator)
    counted = np.arange(rows.shape[1] - 1) >= questions.shape[1]
    return rows[:, 1:], rows[:, :-1], np.tile(counted, (len(rows), 1))


def whole_rows(questions, separator):
    """Inputs and targets have the whole row"""
    rows = join(questions, separator)
    return rows, rows, rows > 0


def no_separator(questions, separator):
    """The separator is missing"""
    rows = np.hstack([questions, questions])
    return rows[:, :-1], rows[:, 1:], rows[:, 1:] >= 0
