"""Two recordings joined: tokens that correspond, heads by change, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from test_compare import LATER, MODEL, ONE, OTHER, PAIRS, PROMPT, SHORTER, see

import regard
from regard.errors import OptionError
from regard.recording.spans import Span
from regard.seen import Seen

SHORT = see(MODEL, SHORTER)


def note(seen):
    return seen.recording.notes["compared"]


def test_both_are_there_layer_by_layer():
    two = ONE.beside(OTHER, names=("before", "after"))
    found = two.recording
    assert (found.sequences, len(found.layers)) == ((0, 0, 1, 1), 2)
    for sequence, seen in enumerate((ONE, OTHER)):
        for layer in (0, 1):
            right = seen.layer(layer).weights()
            shown = two.layer(layer, sequence=sequence).weights()
            np.testing.assert_array_equal(shown, right)
    assert found.tokens == (tuple(PROMPT), tuple(PROMPT))
    assert note(two)["names"] == ["before", "after"]
    assert note(two)["pairs"] is None  # all of them
    assert note(two)["how"] == "the same 8 tokens"


@pytest.mark.parametrize("other", [OTHER, SHORT, see(LATER, SHORTER)])
def test_heads_are_sorted_by_what_moved(other):
    rows = regard.compare(ONE, other).sort("moved").list_rows()
    right = [(x["layer"], x["head"], x["moved"]) for x in rows]
    found = note(ONE.beside(other))["heads"]
    assert [tuple(x[:2]) for x in found] == [x[:2] for x in right]
    np.testing.assert_allclose([x[2] for x in found], [x[2] for x in right], atol=1e-6)
    assert len(found) == 8


def test_other_prompts_are_aligned_by_a_diff_or_by_spans():
    found = note(ONE.beside(SHORT))
    assert list(zip(*found["pairs"], strict=True)) == PAIRS
    spans = ([Span("end", 4, 8)], {"end": (2, 6)})
    found = note(ONE.beside(SHORT, spans=spans))
    # 1 3 8 2 and 4 6 3 8 have 3 and 8 in common
    assert list(zip(*found["pairs"], strict=True)) == [(5, 4), (6, 5)]
    assert found["how"] == "2 tokens of end"
    same = ([Span("start", 0, 3)], [Span("start", 0, 3)])
    assert note(ONE.beside(OTHER, spans=same))["pairs"] == [[0, 1, 2], [0, 1, 2]]


def test_without_ids_texts_are_aligned():
    texts = [tuple(f" {x}" for x in prompt) for prompt in (PROMPT, SHORTER)]
    bare = [
        Seen(replace(x.recording, tokens=(), texts=(text,)))
        for x, text in zip((ONE, SHORT), texts, strict=True)
    ]
    found = note(bare[0].beside(bare[1]))
    assert list(zip(*found["pairs"], strict=True)) == PAIRS


def test_a_pair_is_saved_and_opened(tmp_path):
    two = ONE.beside(OTHER)
    two.save(tmp_path / "two")
    assert note(regard.open(tmp_path / "two")) == note(two)


def test_what_cannot_be_shown_together_is_said():
    with pytest.raises(
        OptionError, match=r"""names=\('A',\), expected two names, as"""
    ):
        ONE.beside(OTHER, names=("A",))
    both = see(MODEL, PROMPT, PROMPT)
    with pytest.raises(OptionError, match="has 2 sequences, expected one in each"):
        both.beside(ONE)
    with pytest.raises(OptionError, match="the two prompts have no token in common"):
        ONE.beside(see(MODEL, [11, 12, 13]))
    apart = ([Span("x", 0, 1)], [Span("x", 1, 2)])
    with pytest.raises(OptionError, match="the spans have no token in common"):
        ONE.beside(SHORT, spans=apart)
    with pytest.raises(OptionError, match="got a int, expected two recordings"):
        ONE.beside(3)
