"""Heads of a real model are found by what they do, and matter for what they are said to."""

import random

import pytest
import torch

from regard.ablate.effect import effect
from regard.nn.weights import load
from regard.seen import watch
from regard.stats.cells import offset
from regard.stats.table import make_table

PASSAGE = (
    "The keeper of the old lighthouse counted seventeen grey ships before the fog came in "
    "from the north, wrote their names into a green book, and climbed down the stairs. "
)
BETWEEN = "Nobody in the village could remember him when spring came. "
INDUCTION = {(17, 3), (17, 4), (17, 5), (18, 6), (20, 6)}  # on any text tried


@pytest.fixture(scope="module")
def scene(smollm):
    """Return the model, the tokens of a text that repeats, and where it does."""
    model, tokenizer = load(smollm)
    tokens = tokenizer.encode(PASSAGE + BETWEEN + PASSAGE)
    return model, tokens, len(tokenizer.encode(PASSAGE + BETWEEN))


@pytest.fixture(scope="module")
def table(scene):
    model, tokens, _ = scene
    with watch(model) as seen, torch.inference_mode():
        model(torch.tensor([tokens]))
    return make_table(seen.recording)


def list_heads(table, by, n):
    rows = table.sort(by).rows[:n]
    return [(int(row["layer"]), int(row["head"])) for row in rows]


@pytest.mark.slow
def test_the_heads_of_smollm_are_found(table):
    assert list_heads(table, "previous", 1) == [(16, 0)]
    assert table.sort("previous").rows["previous"][0] > 0.7
    assert set(list_heads(table, "induction", 3)) <= INDUCTION
    assert table.sort("induction").rows["induction"][2] > 0.3
    assert list_heads(table, "sink", 1) == [(18, 8)]


@pytest.mark.slow
def test_a_head_that_sleeps_on_short_texts_repeats_over_thousands_of_tokens(scene):
    model, _, _ = scene
    rng, far, name = torch.Generator().manual_seed(0), 2500, "blocks.18.attention"
    tokens = torch.randint(5, 40_000, (far,), generator=rng)
    tokens = torch.cat([tokens, tokens[:64]])
    with watch(model, layers=[name]) as seen, torch.inference_mode():
        model(tokens[None])
    stripe = offset(seen.layer(name), far - 1).values[:, far:].mean(1)
    assert stripe[8] > 0.1  # all of it was on the first token in the test above
    assert stripe[7] > 0.3
    assert stripe[:6].max() < 0.01


class Answer:
    """Logits and the loss of the repeated passage."""

    def __init__(self, logits, tokens, start):
        self.logits = logits
        guess = logits[0, start : len(tokens) - 1]
        wanted = torch.tensor(tokens[start + 1 :])
        self.loss = torch.nn.functional.cross_entropy(guess, wanted)


@pytest.mark.slow
def test_without_its_induction_heads_a_model_repeats_worse(scene, table):
    model, tokens, start = scene

    def cut(heads):
        def run(model):
            return Answer(model(torch.tensor([tokens])), tokens, start)

        before, after = effect(model, run, heads=heads).loss
        return after - before

    top = list_heads(table, "induction", 3)
    others = [(layer, h) for layer in range(30) for h in range(9)]
    others = [head for head in others if head not in top]
    draw = random.Random(0)
    random_cuts = [cut(draw.sample(others, 3)) for _ in range(10)]
    assert cut(top) > max(random_cuts)
