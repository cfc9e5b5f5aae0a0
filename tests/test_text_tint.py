"""The tint of a text against dense weights, its request, and the blocks of a text."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import regard
from regard.errors import OptionError
from regard.masks.patterns import causal, per_head, window
from regard.recording.record import Record, Recording
from regard.show import text_tint
from regard.show.log_codes import NAN, decode
from regard.show.map_requests import answer
from regard.show.map_source import MapSource, MissingError
from regard.show.text_blocks import find_blocks
from regard.show.text_tint import TextSelection, tint_tokens
from regard.stats.nonfinite import mark_nonfinite

N = 90


def draw(seed=0, *, n=(N, N), heads=6, shared=2, start=0, mask=None, **more):
    """Return a record of random numbers in float64; queries start at a position."""
    rng = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(heads, n[0], 8, generator=rng, dtype=torch.float64)
    k = 2 * torch.randn(shared, n[1], 8, generator=rng, dtype=torch.float64)
    options = {"scale": 0.4, "softcap": more.get("softcap"), "sink": more.get("sink")}
    done = regard.attention(q, k, k, mask, q_start=start, **options)
    return Record(
        name=f"layer.{seed}",
        q=q,
        k=k,
        lse=done.lse,
        q_positions=torch.arange(start, start + n[0]),
        k_positions=torch.arange(n[1]),
        mask=mask,
        scale=0.4,
        **more,
    )


RECORDS = {
    "causal": lambda: draw(mask=causal()),
    "both ways": lambda: draw(1),
    "by head": lambda: draw(2, heads=2, shared=1, mask=per_head([causal(), window(3)])),
    "cap and sink": lambda: draw(
        3, mask=causal(), softcap=3.0, sink=torch.arange(6.0).double()
    ),
    "last queries": lambda: draw(4, n=(20, N), start=N - 20, mask=causal()),
    "float32": lambda: to_single(draw(5, mask=causal())),
}


def to_single(record):
    return replace(
        record, q=record.q.float(), k=record.k.float(), lse=record.lse.float()
    )


def tint_densely(chosen, first, last, show, combine):
    """Return the definition: all weights of all heads, then sums over whole axes."""
    found = [np.zeros((0, N))]
    for record, heads in chosen:
        weights = np.zeros((record.heads, N, N))  # by position
        weights[:, record.q_positions] = record.weights().double().numpy()
        rows = [i for i in range(first, last + 1) if i in record.q_positions]
        if show == "attending":
            found.append(weights[heads][:, :, first : last + 1].sum(2))
        elif rows:  # a head without these queries is not counted
            found.append(weights[heads][:, rows].mean(1))
    dense = np.concatenate(found)
    if not len(dense):
        return np.zeros(N)
    return dense.max(0) if combine == "max" else dense.mean(0)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("show", ["attended", "attending"])
@pytest.mark.parametrize("combine", ["mean", "max"])
@pytest.mark.parametrize(("first", "last"), [(77, 77), (72, 80), (0, N - 1), (30, 33)])
def test_a_tint_is_its_definition(monkeypatch, name, show, combine, first, last):
    monkeypatch.setattr(text_tint, "CELLS", 1000)  # several strips of rows
    record, other = RECORDS[name](), draw(9, mask=causal())
    for chosen in ([(record, [1])], [(record, [0, 1]), (other, list(range(6)))]):
        selection = TextSelection(first, last, show, combine)
        tint = tint_tokens(chosen, selection, tokens=N)
        right = tint_densely(chosen, first, last, show, combine)
        off = 1e-6 if name == "float32" else 1e-12
        np.testing.assert_allclose(tint.values, right, rtol=off, atol=off)
        assert not tint.values[~tint.allowed].any()
        assert tint.values.min() >= 0
        assert tint.values.max() <= 1 + 10 * off


def test_tokens_that_nobody_may_attend_to_are_known():
    record = draw(mask=causal())
    tint = tint_tokens([(record, [0])], TextSelection(40, 40), tokens=N)
    assert tint.allowed.tolist() == [j <= 40 for j in range(N)]
    selection = TextSelection(40, 40, "attending")
    tint = tint_tokens([(record, [0])], selection, tokens=N)
    assert tint.allowed.tolist() == [i >= 40 for i in range(N)]


def test_queries_that_are_not_there_give_nothing():
    record = RECORDS["last queries"]()
    tint = tint_tokens([(record, [0, 1])], TextSelection(3, 3), tokens=N)
    assert not tint.values.any()
    assert not tint.allowed.any()


def test_rows_without_weights_are_nan():
    record = draw(mask=causal())
    record.k[0, 30, 0] = math.nan  # of the first group of heads
    record = mark_nonfinite(record)
    for combine in ("mean", "max"):
        selection = TextSelection(50, 50, combine=combine)
        tint = tint_tokens([(record, [0, 5])], selection, tokens=N)
        assert np.isnan(tint.values).tolist() == [j <= 50 for j in range(N)]
        tint = tint_tokens([(record, [5])], selection, tokens=N)
        assert not np.isnan(tint.values).any()
    tint = tint_tokens([(record, [0])], TextSelection(20, 20), tokens=N)
    assert tint.values.sum() == pytest.approx(1)


@pytest.fixture
def source():
    cross = replace(draw(2, n=(7, N)), name="decoder.cross")
    records = (draw(0, mask=causal()), draw(1, mask=causal()), cross)
    found = Recording(
        model="Tiny",
        records=records,
        sequences=(0, 0, 0),
        texts=(tuple(f" w{i}" for i in range(N)),),
        notes={"decoders": ["decoder.cross"]},
    )
    source = MapSource(found)
    yield source
    source.close()


def ask(source, **given):
    return answer(source, "text", {"sequence": 0, "first": 60, "last": 60, **given})


@pytest.mark.parametrize(
    ("heads", "chosen"),
    [
        ("", [(0, range(6)), (1, range(6))]),
        ("1", [(1, range(6))]),
        ("1.4", [(1, [4])]),
        ("0.2,1,0.5", [(0, [2, 5]), (1, range(6))]),
    ],
)
def test_a_request_names_heads(source, heads, chosen):
    records = source.recording.records
    pairs = [(records[layer], list(numbers)) for layer, numbers in chosen]
    for show in ("attended", "attending"):
        sheet = ask(source, heads=heads, show=show, combine="max")
        right = tint_densely(pairs, 60, 60, show, "max")
        assert sheet.codes.shape == (1, N)
        assert sheet.describe() == {
            "rows": 1, "columns": N, "level": 0, "how": "max", "exact": True
        }  # fmt: skip
        masked = np.arange(N) > 60 if show == "attended" else np.arange(N) < 60
        assert ((sheet.codes[0] == 0) == masked).all()
        shown = np.nan_to_num(decode(sheet.codes)[0])
        np.testing.assert_allclose(shown, right, rtol=2e-4, atol=2e-9)


def test_a_request_knows_rows_without_weights(source):
    source.recording.records[0].k[0, 30, 0] = math.nan
    for heads, lost in (("0.0", True), ("0.5", False), ("1", False), ("", True)):
        assert (ask(source, heads=heads).codes == NAN).any() == lost


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"first": 61}, OptionError, "first=61 and last=60, expected 0 <= first <= la"),
        ({"last": 90}, MissingError, "there is no token 90, expected 0 to 89."),
        ({"first": "x"}, OptionError, "first='x', expected a whole number."),
        ({"show": "x"}, OptionError, """show='x', expected "attended" or "attending"."""),
        ({"combine": "sum"}, OptionError, """combine='sum', expected "mean" or "max"."""),
        ({"heads": "7"}, MissingError, "there is no layer 7 with sequence 0"),
        ({"heads": "0.6"}, MissingError, "there is no head 6 in layer 0"),
        ({"heads": "0.1.2"}, OptionError, "head='1.2', expected a whole number."),
        ({"heads": "0,"}, OptionError, "layer='', expected a whole number."),
        ({"heads": "0," * 5000}, OptionError, "10000 characters, expected at most 8192"),
        ({"heads": "2"}, MissingError, "layer 2 does not read the tokens of sequence 0"),
        ({"sequence": 4}, MissingError, "no head reads the tokens of sequence 4."),
    ],
)  # fmt: skip
def test_what_cannot_be_tinted_is_said(source, given, error, words):
    with pytest.raises(error) as told:
        ask(source, **given)
    assert words in str(told.value)


CHAT = ["<|im_start|>", "system", "\n", "Be", "brief", ".", "<|im_end|>", "\n"]
CHAT += ["<|im_start|>", "user", "\n", "Hi"]


def test_blocks_are_chat_messages_documents_or_pages():
    assert find_blocks(CHAT) == [
        {"start": 0, "name": "system"},
        {"start": 8, "name": "user"},
    ]
    llama = [
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "us",
        "er",
        "<|end_header_id|>",
    ]
    assert find_blocks(llama) == [
        {"start": 0, "name": "start"},
        {"start": 1, "name": "user"},
    ]
    assert find_blocks(["<|user|>", "Hi", "<|assistant|>", "Yes"]) == [
        {"start": 0, "name": "user"},
        {"start": 2, "name": "assistant"},
    ]
    assert find_blocks(["<start_of_turn>", "model\nsure"])[0]["name"] == "model"
    assert find_blocks(["<|im_start|>", "\n"])[0]["name"] == "message"
    pages = [{"start": 0, "name": "page 1"}, {"start": 2, "name": "page 2"}]
    assert find_blocks(["a", "\f", "b"]) == pages
    assert find_blocks(["a", "b", "</s>"]) == []  # it is one document
    assert find_blocks([]) == []
