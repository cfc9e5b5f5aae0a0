"""Parts of a text become spans of tokens, exactly, or a sentence."""

import pytest
import torch

from regard.errors import OptionError
from regard.nn.weights import load
from regard.recording.spans import Span, find_spans
from regard.seen import watch

TEXT = "Be brief. Why is the sky blue?"
PIECES = ["Be", " brief", ".", " Why", " is", " the", " sky", " blue", "?"]
ENDS = [sum(map(len, PIECES[: i + 1])) for i in range(9)]
OFFSETS = [(b - len(x), b) for x, b in zip(PIECES, ENDS, strict=True)]


def test_ranges_of_characters_become_tokens():
    found = find_spans({"question": (10, 30), "order": (0, 9)}, TEXT, OFFSETS, 9)
    assert list(map(str, found)) == ["question 3:9", "order 0:3"]
    assert "".join(PIECES[found[0].slice]) == " Why is the sky blue?"


def test_pieces_are_found_in_their_order():
    text = "a cat. a dog. a cat."
    offsets = [(i, i + 1) for i in range(len(text))]
    spans = find_spans(["a cat.", "a cat."], text, offsets, len(text))
    assert [(x.name, x.start, x.stop) for x in spans] == [("0", 0, 6), ("1", 14, 20)]
    named = find_spans({"pet": " a dog. "}, text, offsets, len(text))
    assert named == (Span("pet", 7, 13),)


def test_tokens_behind_the_text_are_generated():
    *_, last = find_spans({"order": (0, 9)}, TEXT, OFFSETS, 12)
    assert last == Span("generated", 9, 12)
    assert len(last) == 3


def test_a_token_on_a_border_belongs_to_the_side_with_more_of_it():
    offsets = [(0, 3), (3, 10), (10, 12)]
    left, right = find_spans({"l": (0, 6), "r": (6, 12)}, "x" * 12, offsets, 3)
    assert (left.stop, right.start) == (1, 1)
    left, right = find_spans({"l": (0, 7), "r": (7, 12)}, "x" * 12, offsets, 3)
    assert (left.stop, right.start) == (2, 2)


@pytest.mark.parametrize(
    ("sections", "n", "about"),
    [
        ({"x": "sea"}, 9, "does not occur in the text after character 0"),
        ({"a": "blue", "b": "sky"}, 9, "sections in the same order"),
        ({"x": (5, 2)}, 9, "one past the last. within 0 to 30"),
        ({"x": 5}, 9, "expected a string"),
        ({"x": (0, 1)}, 9, "contains no token"),
        ("sky", 9, "sections is a str"),
        ({"x": "sky"}, 4, "offsets for 9 tokens, but the sequence has 4"),
        ([{"role": "user", "content": None}], 9, "'0 user' is None"),
    ],
)
def test_what_cannot_be_found_is_said(sections, n, about):
    with pytest.raises(OptionError, match=about.replace("(", r"\(")):
        find_spans(sections, TEXT, OFFSETS, n)


def test_the_roles_of_a_chat_are_spans_of_a_watched_model(smollm):
    model, tokenizer = load(smollm)
    messages = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "Why is the sky blue? 🙂"},
    ]
    text = tokenizer.chat(messages)
    tokens = tokenizer.encode(text, whole=False)
    with watch(model, layers=[0]) as seen, torch.no_grad():
        model(torch.tensor([tokens]))
    offsets = tokenizer.offsets(text, whole=False)
    system, user = seen.spans(messages, text=text, offsets=offsets)
    assert (system.name, user.name) == ("0 system", "1 user")
    assert tokenizer.decode(tokens[system.slice]) == "You are brief."
    assert tokenizer.decode(tokens[user.slice]) == "Why is the sky blue? 🙂"
    with pytest.raises(OptionError, match="there is no sequence 3"):
        seen.spans(messages, text=text, offsets=offsets, sequence=3)
