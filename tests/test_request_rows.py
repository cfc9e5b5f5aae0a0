"""Rows of served requests become records, in whatever pieces and order they come."""

import numpy as np
import pytest
import torch

from regard.definition.attention import attention
from regard.errors import OptionError
from regard.masks.patterns import causal, last
from regard.seen import watch
from regard.serving.engine import choose_layers, match_engine
from regard.serving.layer_engine import compute_lse
from regard.serving.paged_cache import ARRANGEMENTS, find_arrangement, read_keys
from regard.serving.request_rows import LayerFacts, RequestRows, make_record
from regard.serving.vllm import list_numbers
from regard.serving.vllm_worker import clean_name

N, H, HK, D = 23, 4, 2, 8
FACTS = LayerFacts(name="attn", scale=0.3)


def draw(seed=0):
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(N, H, D)), rng.normal(size=(N, HK, D))
    return torch.from_numpy(q), torch.from_numpy(k)


def add(request, q, k, first, end):
    request.layer("attn").add(first, q[first:end], k[first:end], None)
    request.add_tokens(first, list(range(first, end)))


def expect(q, k, facts=FACTS, sink=None):
    q, k = (x.numpy().transpose(1, 0, 2) for x in (q, k))
    options = {"scale": facts.scale, "softcap": facts.softcap, "sink": sink}
    mask = causal() if facts.window is None else last(facts.window)
    return attention(q, k, k, mask, see=("weights",), **options).weights


def check(request, expected, facts=FACTS, first=0):
    record = make_record(facts, request, compute_lse)
    assert record.q_positions.tolist() == list(range(first, N))
    np.testing.assert_allclose(record.weights(), expected[:, first:], atol=1e-12)


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 23)],
        [(0, 7), (7, 14), (14, 23)],
        [(0, 20), (20, 21), (21, 22), (22, 23)],
        [(0, 15), (0, 16), (16, 23)],  # preempted, and begun again
        [(0, 20), (20, 23), (8, 23)],  # preempted, with a prefix from the cache
    ],
    ids=["whole", "chunks", "steps", "again", "resumed"],
)
@pytest.mark.parametrize("window", [None, 5])
def test_pieces_become_one_record(pieces, window):
    q, k = draw()
    facts = LayerFacts(name="attn", scale=0.3, window=window, softcap=2.0)
    request = RequestRows("0")
    for first, end in pieces:
        add(request, q, k, first, end)
    check(request, expect(q, k, facts), facts)
    assert request.list_tokens() == tuple(range(N))


def test_the_last_row_of_a_position_counts():
    q, k = draw()
    other = draw(1)
    request = RequestRows("0")
    add(request, *other, 0, N)
    add(request, q, k, 0, N)
    check(request, expect(q, k))


def test_a_cached_prefix_has_keys_and_no_queries():
    q, k = draw()
    request = RequestRows("0")
    request.layer("attn").add_keys(0, k[:16])
    add(request, q, k, 16, N)
    check(request, expect(q, k), first=16)
    assert request.list_tokens() == ()  # those of the prefix were not told


def test_a_window_may_have_lost_its_first_keys():
    q, k = draw()
    facts = LayerFacts(name="attn", scale=0.3, window=4)
    request = RequestRows("0")
    request.layer("attn").add_keys(10, k[10:16])
    add(request, q, k, 16, N)
    record = make_record(facts, request, compute_lse)
    assert record.k_positions.tolist() == list(range(10, N))
    np.testing.assert_allclose(
        record.weights(), expect(q, k, facts)[:, 16:, 10:], atol=1e-12
    )


def test_a_layer_may_have_the_keys_of_another_one():
    q, k = draw()
    request = RequestRows("0")
    request.layer("first").add(0, q, k, None)
    request.layer("attn").add(0, q, None, None)
    facts = LayerFacts(
        name="attn", scale=0.3, keys_of="first", sink=torch.ones(H).double()
    )
    check(request, expect(q, k, facts, sink=np.ones(H)), facts)


def test_missing_rows_are_no_record():
    q, k = draw()
    request = RequestRows("0")
    add(request, q, k, 0, 5)
    add(request, q, k, 9, N)
    with pytest.raises(ValueError, match="some of its rows between others are missing"):
        make_record(FACTS, request, compute_lse)


# ---- the paged cache

BLOCK = 32


def fill(number, keys, slots):
    """Return a cache in one of the arrangements, with keys where the slots say."""
    shape = (2, 6, BLOCK, HK, D) if number == 4 else (6, 2, BLOCK, HK, D)
    cache = torch.randn(*(shape if number >= 4 else (6, HK, BLOCK, 2 * D)))
    blocks = ARRANGEMENTS[number](cache, HK, D)
    if number == 3:  # a view with merged axes is a copy: write through the tiles
        tiles = cache.flatten(2)[..., : BLOCK * D].unflatten(-1, (-1, D // 2, 16, 2))
        for key, slot in zip(keys, slots.tolist(), strict=True):
            block, row = divmod(slot, BLOCK)
            tiles[block, :, row // 16, :, row % 16] = key.unflatten(-1, (-1, 2))
    else:
        blocks[slots // BLOCK, slots % BLOCK] = keys
    return cache


@pytest.mark.parametrize("number", range(len(ARRANGEMENTS)))
def test_keys_are_read_as_they_were_written(number):
    keys = torch.randn(80, HK, D)
    table = [4, 2, 5]
    slots = torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(80)])
    cache = fill(number, keys, slots)
    arrange = find_arrangement(cache, slots[70:], keys[70:])
    assert arrange is ARRANGEMENTS[number]
    first, found = read_keys(cache, arrange, table, keys, 70)
    assert first == 0
    assert torch.equal(found, keys[:70])
    first, found = read_keys(
        cache, arrange, [0, 2, 5], keys, 70
    )  # a window left block 4
    assert first == BLOCK
    assert torch.equal(found, keys[BLOCK:70])


def test_an_unknown_arrangement_is_not_guessed():
    keys = torch.randn(3, HK, D)
    cache = torch.randn(6, HK, BLOCK, 2 * D)
    assert find_arrangement(cache, torch.tensor([40, 41, 42]), keys) is None
    assert find_arrangement(torch.randn(3, 4), torch.tensor([0, 1, 2]), keys) is None


# ---- names


def test_requests_are_sorted_as_they_were_made():
    names = ["10-12345678", "9-0a0a0a0a", "1_9-0a0a0a0b", "0_9-0a0a0a0c"]
    cleaned = [clean_name(x) for x in names]
    assert cleaned == ["10", "9", "1_9", "0_9"]
    assert sorted(cleaned, key=list_numbers) == ["9", "0_9", "1_9", "10"]


def test_layers_are_chosen_by_number_name_or_module_around_them():
    names = [f"model.layers.{i}.attn" for i in range(3)]
    assert choose_layers(names, None) == names
    assert choose_layers(names, [0, "model.layers.2"]) == [names[0], names[2]]
    assert choose_layers(names, "model.layers.1.attn") == [names[1]]
    with pytest.raises(OptionError, match="there is no layer 'model"):
        choose_layers(names, ["model.layers.9"])


def test_only_engines_are_engines():
    assert match_engine(torch.nn.Linear(2, 2)) is None
    kind = type("LLM", (), {"__module__": "vllm.entrypoints.llm"})
    assert match_engine(kind()).name == "vLLM"
    assert match_engine(type("Mine", (kind,), {})()).name == "vLLM"


def test_an_engine_without_the_plugin_is_told_what_to_install():
    class LLM:
        def collective_rpc(self, method, **_options):
            raise NotImplementedError(f"no method {method}")

    LLM.__module__ = "vllm.entrypoints.llm"
    with (
        pytest.raises(OptionError, match="Install regard into the environment of vLLM"),
        watch(LLM()),
    ):
        pass
