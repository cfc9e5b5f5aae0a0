"""Tints by value and by rollout, against dense weights and dense products."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_text_tint import N, draw

from regard.errors import OptionError
from regard.masks.patterns import causal, window
from regard.recording.record import Recording
from regard.show.log_codes import decode
from regard.show.map_requests import answer
from regard.show.map_source import MapSource, MissingError
from regard.show.text_rollout import tint_by_rollout
from regard.show.text_tint import TextSelection, tint_tokens
from regard.stats import rollout
from regard.stats.rollout import find_rollout_obstacle


def add_values(record, seed):
    rng = torch.Generator().manual_seed(seed)
    v = torch.randn(2, N, 5, generator=rng, dtype=torch.float64)
    return replace(
        record, v=v * torch.linspace(0.1, 3, N, dtype=torch.float64)[:, None]
    )


@pytest.fixture(scope="module")
def records():
    masks = [causal(), causal() & window(7), causal()]
    return [add_values(draw(i, mask=x), i) for i, x in enumerate(masks)]


@pytest.mark.parametrize("show", ["attended", "attending"])
@pytest.mark.parametrize("combine", ["mean", "max"])
@pytest.mark.parametrize(("first", "last"), [(60, 60), (50, 63)])
def test_by_value_a_weight_is_multiplied_by_the_length_of_its_value(
    records, show, combine, first, last
):
    chosen = [(records[0], [1, 4]), (records[1], list(range(6)))]
    selection = TextSelection(first, last, show, combine, "value")
    found = tint_tokens(chosen, selection, tokens=N, longest=7.0)
    written = []
    for record, heads in chosen:
        lengths = np.sqrt((record.v.numpy() ** 2).sum(-1)) / 7.0  # (2, N)
        dense = record.weights().numpy() * np.repeat(lengths, 3, 0)[:, None]
        part = slice(first, last + 1)
        dense = (
            dense[:, part].mean(1) if show == "attended" else dense[..., part].sum(2)
        )
        written.append(dense[heads])
    right = np.concatenate(written)
    right = right.max(0) if combine == "max" else right.mean(0)
    np.testing.assert_allclose(found.values, right, rtol=1e-12, atol=1e-15)


def roll_densely(records):
    """Return the product of (mean over heads + identity) / 2, the last layer first."""
    product = np.eye(N)
    for record in records:
        product = (record.weights().numpy().mean(0) + np.eye(N)) / 2 @ product
    return product


@pytest.mark.parametrize(("first", "last"), [(60, 60), (50, 63), (0, N - 1)])
def test_a_rollout_is_the_product_of_all_layers(records, first, last):
    right = roll_densely(records)
    np.testing.assert_allclose(right.sum(1), 1)
    part = slice(first, last + 1)
    found = tint_by_rollout(records, TextSelection(first, last), tokens=N)
    np.testing.assert_allclose(
        found.values, right[part].mean(0), rtol=1e-10, atol=1e-14
    )
    assert found.allowed.tolist() == [j <= last for j in range(N)]
    found = tint_by_rollout(records, TextSelection(first, last, "attending"), tokens=N)
    np.testing.assert_allclose(
        found.values, right[:, part].sum(1), rtol=1e-10, atol=1e-14
    )
    assert found.allowed.tolist() == [i >= first for i in range(N)]


def test_a_rollout_of_another_order_is_another_one(records):
    found = tint_by_rollout(records[::-1], TextSelection(60, 60), tokens=N)
    assert np.abs(found.values - roll_densely(records)[60]).max() > 1e-3


def test_where_there_is_no_rollout_it_is_said(records, monkeypatch):
    assert find_rollout_obstacle(records) == ""
    assert find_rollout_obstacle(records[:1]).startswith("it needs at least two layers")
    short = replace(draw(5, n=(20, N), start=N - 20, mask=causal()), name="short")
    words = (
        "short has other queries or keys than layer.0; it needs layers over the same"
    )
    assert find_rollout_obstacle([*records, short]).startswith(words)
    monkeypatch.setattr(rollout, "CELLS", 1000)
    assert find_rollout_obstacle(records) == "it would take minutes for so many tokens"


@pytest.fixture
def source(records):
    texts = (tuple(f" w{i}" for i in range(N)),)
    made = MapSource(
        Recording(model="Tiny", records=tuple(records), sequences=(0,) * 3, texts=texts)
    )
    yield made
    made.close()


def ask(source, **given):
    asked = {"sequence": 0, "first": 60, "last": 60, **given}
    return np.nan_to_num(decode(answer(source, "text", asked).codes)[0])


def test_a_request_may_ask_for_both(source, records):
    assert source.about["sequences"][0]["ways"] == {"value": "", "rollout": ""}
    right = roll_densely(records)
    np.testing.assert_allclose(
        ask(source, by="rollout"), right[60], rtol=2e-4, atol=2e-9
    )
    found = ask(source, by="rollout", heads="0.1")  # of all heads, whatever is chosen
    np.testing.assert_allclose(found, right[60], rtol=2e-4, atol=2e-9)
    lengths = [np.sqrt((x.v.numpy() ** 2).sum(-1)) for x in records]
    longest = max(x.max() for x in lengths)
    dense = records[2].weights().numpy()[5, 60] * lengths[2][1] / longest
    found = ask(source, by="value", heads="2.5")
    np.testing.assert_allclose(found, dense, rtol=2e-4, atol=2e-9)


def test_what_is_missing_is_said(records):
    bare = tuple(replace(x, v=None) for x in records[:1])
    texts = (tuple(f" w{i}" for i in range(N)),)
    source = MapSource(Recording(model="T", records=bare, sequences=(0,), texts=texts))
    ways = source.about["sequences"][0]["ways"]
    assert 'regard.watch(model, keep="qkv")' in ways["value"]
    assert ways["rollout"].startswith("it needs at least two layers")
    with pytest.raises(
        OptionError, match=r"layer.0 has no values. Record with regard.w"
    ):
        ask(source, by="value")
    with pytest.raises(
        MissingError, match="there is no rollout: it needs at least two"
    ):
        ask(source, by="rollout")
    with pytest.raises(
        OptionError, match="""by='x', expected "weight" or "value" or"""
    ):
        ask(source, by="x")


def test_a_row_without_weights_has_no_rollout(records):
    broken = replace(records[1], k=records[1].k.clone())
    broken.k[0, 30, 0] = math.nan
    chosen = [records[0], broken, records[2]]
    found = tint_by_rollout(chosen, TextSelection(60, 60), tokens=N)
    assert np.isnan(found.values[:61]).all()
    found = tint_by_rollout(chosen, TextSelection(20, 20), tokens=N)
    assert found.values.sum() == pytest.approx(1)
