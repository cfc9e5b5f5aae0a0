"""A task to train on: the delayed copy

Training needs inputs, targets and a loss over the right positions. The smallest task
that needs attention is to repeat a row of tokens after reading all of it:

    sequence     3 1 4 = 3 1 4         question, separator, answer
    inputs       3 1 4 = 3 1           all but the last
    targets      1 4 = 3 1 4           all but the first: the next token of each input
    counted      . . . x x x           the loss counts only the answer

The model reads `inputs` and predicts the next token at each position. The question is
random and cannot be predicted, so the loss does not count it. The first counted
position is the separator, whose next token is the first of the answer.

The delay is essential. If the target were the token at the same position, a causal
model would only have to attend to itself, and attention would learn nothing. Here it
has to look back by the length of the question.

When your batches are right, a head is trained on them in NumPy, by gradient descent on
its scores, one for each pair of positions. (`regard train copy` trains a whole model
on the same task.)

Write `copy_batch(questions, separator)`: the tuple `inputs, targets, counted` for
questions `(B, n)`, each `(B, 2n)`; `counted` is boolean.

Next: induction_head.py
"""

import numpy as np

NAME = "copy_batch"
MINUTES = 15
NEEDS = ("decoder_logits",)
EXTRA = ""
STUB = '''import numpy as np


def copy_batch(questions, separator):
    """Return inputs, targets and counted, each (B, 2n), for questions (B, n)."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "Build the whole sequences (B, 2n + 1) first; inputs and targets are slices of "
    "them.",
    "np.full((B, 1), separator) is a column; join with np.concatenate([...], axis=1).",
    "inputs = whole[:, :-1], targets = whole[:, 1:], counted is True from column n on.",
)


def spec(questions, separator):
    B, n = questions.shape
    inputs, targets = np.zeros((2, B, 2 * n), dtype=int)
    counted = np.zeros((B, 2 * n), dtype=bool)
    for b in range(B):
        row = [*questions[b], separator, *questions[b]]
        for i in range(2 * n):
            inputs[b, i] = row[i]
            targets[b, i] = row[i + 1]
            counted[b, i] = i >= n
    return inputs, targets, counted


def reference(questions, separator):
    B, n = questions.shape
    middle = np.full((B, 1), separator)
    whole = np.concatenate([questions, middle, questions], axis=1)
    counted = np.broadcast_to(np.arange(2 * n) >= n, (B, 2 * n))
    return whole[:, :-1], whole[:, 1:], counted


def draw(rng):
    yield np.array([[1, 0]]), 2
    for B, n in ((5, 1), (1, 3), (2, 3), (3, 4), (4, int(rng.integers(2, 7)))):
        yield rng.integers(9, size=(B, n)), 9
    for B, n in ((18, 2), (2, 18), (2, 18)):
        yield rng.integers(100, size=(B, n)), 100


def check(fn, rng):
    """Train one head with a score per pair of positions, and test new questions."""
    n, scores = 4, np.zeros((8, 8))
    future = np.triu(np.ones((8, 8), bool), 1)
    for _ in range(40):
        inputs, targets, counted = map(np.asarray, fn(rng.integers(6, size=(32, n)), 6))
        parts = np.where(future, 0, np.exp(scores))
        weights = parts / parts.sum(axis=1, keepdims=True)
        hit = inputs[:, None, :] == targets[:, :, None]  # keys that hold the target
        chance = np.maximum((weights * hit).sum(axis=2, keepdims=True), 1e-3)
        slope = weights * (hit / chance - 1) * counted[:, :, None]
        scores += 4 * slope.mean(axis=0)  # ascends the log-likelihood
    inputs, targets, counted = map(np.asarray, fn(rng.integers(6, size=(100, n)), 6))
    guess = np.take_along_axis(inputs, weights.argmax(axis=1)[None], axis=1)
    right = (guess == targets)[counted].mean()
    back = np.mean([weights[i, i - n] for i in range(n, 2 * n)])
    if right < 1:
        return (
            f"A head trained on your batches copies only {right:.0%} of new questions."
        )
    print(  # noqa: T201 (shown to the learner)
        f"Trained on your batches for 40 steps, a head has {back:.0%} of its weight "
        f"{n} tokens back and copies {right:.0%} of new questions."
    )
    return None


def mistake_not_shifted(questions, separator):
    """The target is the token at the same position, which needs no attention: it must
    be the next token, so inputs are all but the last and targets all but the first."""
    inputs, _, counted = reference(questions, separator)
    return inputs, inputs, counted


def mistake_all_counted(questions, separator):
    """The loss counts the question too, which is random: count the answer only."""
    inputs, targets, counted = reference(questions, separator)
    return inputs, targets, np.ones_like(counted)


def mistake_counted_late(questions, separator):
    """The first token of the answer is not counted: it is predicted at the separator,
    so counting starts at column n of the targets."""
    inputs, targets, counted = reference(questions, separator)
    return inputs, targets, np.roll(counted, 1, axis=1) & counted


def mistake_counted_early(questions, separator):
    """The separator is counted as part of the answer: counting starts at column n of
    the targets, one after it."""
    inputs, targets, counted = reference(questions, separator)
    return inputs, targets, np.roll(counted, -1, axis=1) | counted


def mistake_exchanged(questions, separator):
    """Inputs and targets are swapped: the model reads all but the last token, and the
    targets are all but the first."""
    inputs, targets, counted = reference(questions, separator)
    return targets, inputs, counted


def mistake_whole_rows(questions, separator):
    """Inputs and targets have the whole row: inputs are all tokens but the last,
    targets all but the first."""
    inputs, targets, _ = reference(questions, separator)
    rows = np.concatenate([inputs, targets[:, -1:]], axis=1)
    return rows, rows, rows > 0


def mistake_no_separator(questions, separator):
    """The separator is missing: a row is the question, the separator, and the question
    again."""
    rows = np.concatenate([questions, questions], axis=1)
    return rows[:, :-1], rows[:, 1:], rows[:, 1:] >= 0


def mistake_counts_the_question(questions, separator):
    """The loss counts the question instead of the answer: count the last n columns."""
    inputs, targets, counted = reference(questions, separator)
    return inputs, targets, ~counted


def mistake_backwards(questions, separator):
    """The answer is the question in reverse: copy it in the same order."""
    back = questions[:, ::-1]
    inputs, targets, counted = reference(questions, separator)
    n = questions.shape[1]
    inputs = np.concatenate([inputs[:, : n + 1], back[:, :-1]], axis=1)
    return inputs, np.concatenate([targets[:, :n], back], axis=1), counted
