"""The tasks: right answers, an honest split, texts; and a small model that learns one."""

import time

import numpy as np
import pytest
import torch
from train_worker import make_model

from regard.errors import FileError, OptionError
from regard.nn.tasks import (
    PUZZLES,
    Addition,
    Copy,
    Reverse,
    Sort,
    is_held_out,
    measure_accuracy,
    read_text,
)
from regard.nn.train import Plan, evaluate_loss, train


def lines(task, size, seed=0, step=0, *, held_out=False):
    tokens, _ = task.batch(size, seed, step, held_out=held_out)
    return [task.show(row) for row in tokens]


def add(question):
    return str(sum(map(int, question.split("+")))).zfill(4)[::-1]


SOLUTIONS = {
    "copy": str,
    "reverse": lambda question: question[::-1],
    "sort": lambda question: "".join(sorted(question)),
    "addition": add,
}


@pytest.mark.parametrize("name", PUZZLES)
@pytest.mark.parametrize("held_out", [False, True])
def test_every_answer_is_right_and_the_loss_counts_it_alone(name, held_out):
    task = PUZZLES[name]()
    tokens, answers = task.batch(300, 5, 7, held_out=held_out)
    assert tokens.dtype == torch.int64
    assert tokens.shape == answers.shape == (300, task.length)
    for row, mask in zip(tokens, answers, strict=True):
        question, answer = task.show(row).split("=")
        assert answer == SOLUTIONS[name](question)
        assert task.show(row[mask]) == answer
    assert int(tokens.max()) < task.vocabulary == len(set(task.signs))


def test_the_samples_are_these():
    assert lines(Copy(5), 2) == ["86523=86523", "00018=00018"]
    assert lines(Reverse(5), 1) == ["86523=32568"]
    assert lines(Sort(5, symbols=36), 1) == ["umi9b=9bimu"]
    assert lines(Addition(), 2) == ["865+300=5611", "018+956=4790"]
    assert lines(Addition(2), 1) == ["86+23=901"]


@pytest.mark.parametrize("name", PUZZLES)
def test_a_batch_is_a_function_of_seed_and_step(name):
    task = PUZZLES[name]()
    once = task.batch(50, 3, 4)
    np.random.default_rng(0).random()
    torch.manual_seed(1)
    assert all(
        torch.equal(x, y) for x, y in zip(once, task.batch(50, 3, 4), strict=True)
    )
    for seed, step in ((3, 5), (4, 4), (4, 3)):
        assert not torch.equal(once[0], task.batch(50, seed, step)[0])


def questions(task, *, held_out, batches=40):
    drawn = (
        lines(task, 200, seed, step, held_out=held_out)
        for seed in range(2)
        for step in range(batches // 2)
    )
    return {line.split("=")[0] for some in drawn for line in some}


def test_held_out_questions_are_never_trained_on():
    taught = questions(Copy(3), held_out=False)
    kept = questions(Copy(3), held_out=True)
    assert not taught & kept
    assert len(taught | kept) > 990  # of 1,000: nothing falls between
    assert 70 < len(kept) < 130
    every = np.stack(np.meshgrid(*[np.arange(10)] * 4), -1).reshape(-1, 4)
    assert is_held_out(every).mean() == pytest.approx(0.1, abs=0.01)


def test_the_split_ignores_an_order_that_does_not_matter():
    taught, kept = (
        {"".join(sorted(q)) for q in questions(Sort(4), held_out=side)}
        for side in (False, True)
    )
    assert not taught & kept
    assert len(taught | kept) > 700  # of 715
    taught, kept = (
        {tuple(sorted(q.split("+"))) for q in questions(Addition(1), held_out=side)}
        for side in (False, True)
    )
    assert not taught & kept
    assert len(taught | kept) == 55
    assert kept


def test_too_few_questions_are_refused():
    with pytest.raises(OptionError) as error:
        for symbols in (2, 3):
            Copy(1, symbols=symbols).batch(4, 0, 0, held_out=True)
    assert str(error.value) == (
        "Copy(items=1, symbols=2) has too few different questions to hold some out. "
        "Make it larger."
    )
    with pytest.raises(OptionError, match="symbols=37, expected 2 to 36"):
        Copy(4, symbols=37)
    with pytest.raises(OptionError, match="items=0, expected at least 1"):
        Sort(0)
    with pytest.raises(OptionError, match="digits=18, expected 1 to 17"):
        Addition(18)


# texts


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    words = np.random.default_rng(0).choice(["Öl ", "und ", "Essig ", "€ "], 400)
    path.write_text("".join(words), encoding="utf-8")
    return path


class Halves:
    """A tokenizer of another kind: a token is two characters."""

    def __init__(self, text):
        self.pairs = sorted({text[i : i + 2] for i in range(0, len(text), 2)})

    def encode(self, text):
        return [self.pairs.index(text[i : i + 2]) for i in range(0, len(text), 2)]

    def decode(self, ids):
        return "".join(self.pairs[i] for i in ids)


@pytest.mark.parametrize("way", ["bytes", "characters", "tokenizer"])
def test_windows_lie_on_one_side_of_the_last_tenth(file, way):
    text = file.read_text(encoding="utf-8")
    task = read_text(file, Halves(text) if way == "tokenizer" else way, length=20)
    whole = {
        "bytes": list(text.encode()),
        "characters": [sorted(set(text)).index(sign) for sign in text],
        "tokenizer": Halves(text).encode(text),
    }[way]
    assert task.vocabulary == (256 if way == "bytes" else max(whole) + 1)
    cut = len(whole) - len(whole) // 10
    sides = {False: whole[:cut], True: whole[cut:]}
    for held_out, side in sides.items():
        tokens, answers = task.batch(40_000, 0, 0, held_out=held_out)
        drawn = {tuple(row) for row in tokens.tolist()}
        assert drawn == {tuple(side[i : i + 20]) for i in range(len(side) - 19)}
        assert answers[:, 1:].all()
        assert not answers[:, 0].any()
    assert task.show(task.tokens) == text
    same = task.batch(9, 1, 2)[0]
    assert torch.equal(same, task.batch(9, 1, 2)[0])
    assert not torch.equal(same, task.batch(9, 1, 3)[0])


def test_a_text_is_known_by_its_contents(file):
    first = read_text(file, "characters").describe()
    assert first["alphabet"] == "".join(sorted(set("Öl und Essig €")))
    assert first["codec"] == "Characters"
    again = read_text(file, "characters").describe()
    file.write_text(file.read_text(encoding="utf-8").replace("€ Ö", "Ö €"), "utf-8")
    other = read_text(file, "characters").describe()
    assert first == again
    assert {k for k in first if first[k] != other[k]} == {"digest"}


def test_a_text_that_cannot_be_read_is_refused(tmp_path, file):
    with pytest.raises(FileError) as error:
        read_text(tmp_path / "none")
    assert str(error.value) == (
        f"cannot read {tmp_path / 'none'}: No such file or directory."
    )
    raw = tmp_path / "raw"
    raw.write_bytes(bytes(range(256)) * 10)
    assert read_text(raw).vocabulary == 256
    with pytest.raises(FileError) as error:
        read_text(raw, "characters")
    assert str(error.value) == (
        f"{raw} is not UTF-8 (byte 128). Train on its bytes instead."
    )
    with pytest.raises(OptionError) as error:
        read_text(raw, length=257)
    assert str(error.value) == (
        f"length=257, but {raw} has 2560 tokens, of which the last 256 are held out. "
        "Expected 2 <= length <= that."
    )
    with pytest.raises(OptionError, match="the character 'x' is not in this alphabet"):
        read_text(file, "characters").codec.encode("x")
    (tmp_path / "empty").touch()
    for way in ("bytes", "characters"):
        with pytest.raises(OptionError, match="has 0 tokens"):
            read_text(tmp_path / "empty", way)


# learning


def test_measure_counts_whole_answers_that_the_model_wrote_itself():
    task = Copy(3, symbols=6)
    model = make_model(task, dropout=0.1)
    train(model, task, Plan(steps=40, rate=1e-2, warmup=5), show=False)
    tokens, _ = task.batch(90, 0, 0, held_out=True)
    model.eval()
    right = 0
    for row in tokens:
        text = row[:4]
        for _ in range(3):  # reading all of it again for each token
            text = torch.cat([text, model(text[None])[0, -1:].argmax(-1)])
        right += torch.equal(text, row)
    model.train()
    assert 0 < right < 90  # neither knows nothing nor all
    assert measure_accuracy(model, task, 90, batch=40) == right / 90
    assert model.training


def test_a_small_model_learns_to_reverse():
    task = Reverse(6)
    model = make_model(task, width=64, heads=4)
    assert measure_accuracy(model, task) < 0.01
    began = time.monotonic()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(model, task, Plan(steps=150, rate=3e-3, warmup=20), show=False)
    torch.set_num_threads(threads)
    assert measure_accuracy(model, task) >= 0.99
    assert time.monotonic() - began < 120


def test_a_small_model_learns_a_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 60)
    task = read_text(path, "characters", length=40)
    model = make_model(task, width=32, position="rotary")
    before = evaluate_loss(model, task, 50)
    train(model, task, Plan(steps=60, batch=16, rate=1e-2, warmup=5), show=False)
    assert before > 2.5
    assert evaluate_loss(model, task, 50) < 0.3
    with pytest.raises(OptionError, match="a text has no right answer"):
        measure_accuracy(model, task)
