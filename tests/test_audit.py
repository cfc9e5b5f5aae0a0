"""Planted faults are found under their names, in their layers and heads; health is not."""

import math
import os
import sys
from dataclasses import dataclass, replace

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard.audit import row_summary
from regard.audit.audit import audit
from regard.audit.audited_record import find_columns
from regard.audit.compare import compare
from regard.audit.finding import ADVICE
from regard.engine.choose import attend
from regard.errors import MaskError, OptionError, ShapeError
from regard.masks.patterns import (
    array,
    causal,
    everything,
    padding,
    per_head,
    same,
    where,
    window,
)
from regard.recording.evidence import Covered
from regard.recording.record import Record, Recording
from regard.seen import watch

WIDTH, HEADS, SHARED, HEAD = 32, 4, 2, 8
TOKENS = torch.arange(24).reshape(2, 12) % 11


@dataclass(frozen=True)
class Plan:
    """What a model is, and the fault that is planted in some heads of one layer."""

    fault: str = ""
    layer: int = 1
    heads: tuple[int, ...] = (2,)
    window: int | None = None  # how many others are seen
    softcap: float | None = None
    causal: bool = True


class SelfAttention(nn.Module):
    """Attention as people write it, with one switch for each of their mistakes."""

    def __init__(self, plan, fault):
        super().__init__()
        self.plan, self.fault = plan, fault
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * SHARED) * HEAD)
        self.out = nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, x, valid=None, documents=None, past=None):
        q, k, v = self.project(x)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        kept = k, v
        k, v = self.share(k), self.share(v)
        if self.fault == "is_causal with a cache":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.plan.softcap:
            y = self.run_capped(q, k, v, self.write_mask(q, k, valid, documents))
        else:
            allowed = self.write_mask(q, k, valid, documents)
            y = F.scaled_dot_product_attention(q, k, v, allowed)
        return self.out(y.transpose(1, 2).flatten(2)), kept

    def project(self, x):
        heads = self.qkv(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        q, k, v = heads.split([HEADS, SHARED, SHARED], 1)
        some, q = list(self.plan.heads), q.clone()
        if self.fault == "dead head":
            q[:, some] = 0
        if self.fault == "saturated head":
            q[:, some] *= 1_000
        if self.fault == "nan":
            q[:, some, 4] = math.nan
        return q, k, v

    def share(self, x):
        times = HEADS // SHARED
        if self.fault == "tiled heads":
            return x.repeat(1, times, 1, 1)
        return x.repeat_interleave(times, 1)

    def write_mask(self, q, k, valid, documents):
        """Return who sees whom, (B, H, Nq, Nk), wrong in some heads."""
        right = self.write_heads(q, k, valid, documents, "")
        wrong = self.write_heads(q, k, valid, documents, self.fault)
        flags = torch.tensor([h in self.plan.heads for h in range(HEADS)])
        return torch.where(flags[:, None, None], wrong, right)

    def write_heads(self, q, k, valid, documents, fault):
        n_q, n_k = q.shape[2], k.shape[2]
        at_q, at_k = torch.arange(n_k - n_q, n_k)[:, None], torch.arange(n_k)
        if fault == "top-left mask":
            at_q = at_q - (n_k - n_q)
        allowed = torch.ones(len(q), 1, n_q, n_k, dtype=torch.bool)
        if self.plan.causal and fault != "not causal":
            allowed = allowed & (at_k <= at_q - int(fault == "no diagonal"))
        if self.plan.window is not None:
            reach = self.plan.window + {"wide": 1, "narrow": -1}.get(fault, 0)
            allowed = allowed & (at_k >= at_q - reach)
        if valid is not None and fault != "padding seen":
            allowed = allowed & valid[:, None, None, :]
        if documents is not None and fault != "documents mixed":
            allowed = allowed & (
                documents[:, None, None] == documents[:, None, :, None]
            )
        if fault == "row without keys":
            allowed = allowed & (at_q != 5)
        return ~allowed if fault == "polarity" else allowed

    def run_capped(self, q, k, v, allowed):
        """Compute it by hand: softcap, then mask; or the other way round."""
        cap, s = self.plan.softcap, q @ k.mT / math.sqrt(HEAD)
        right = (cap * torch.tanh(s / cap)).masked_fill(~allowed, -math.inf)
        late = cap * torch.tanh(s.masked_fill(~allowed, -math.inf) / cap)
        flags = torch.tensor([h in self.plan.heads for h in range(HEADS)])
        wrong = late if self.fault == "softcap late" else right
        return torch.where(flags[:, None, None], wrong, right).softmax(-1) @ v


class Tiny(nn.Module):
    def __init__(self, plan):
        super().__init__()
        torch.manual_seed(0)
        self.plan = plan
        self.embed, self.place = nn.Embedding(11, WIDTH), nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(
            SelfAttention(plan, plan.fault if i == plan.layer else "") for i in range(3)
        )

    def forward(self, input_ids, attention_mask=None, documents=None, cache=None):
        n = input_ids.shape[1] + (cache[0][0].shape[2] if cache else 0)
        at = torch.arange(n).expand(len(input_ids), n)
        if attention_mask is not None and self.plan.fault != "positions not shifted":
            at = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        x = self.embed(input_ids) + self.place(at[:, -input_ids.shape[1] :])
        kept = []
        for i, layer in enumerate(self.layers):
            past = cache[i] if cache else None
            y, new = layer(F.layer_norm(x, (WIDTH,)), attention_mask, documents, past)
            x, kept = x + y, [*kept, new]
        return kept


def record(plan, *tokens, chunks=(), **inputs):
    """Run a model on some tokens, the rest of them with a cache, and watch it."""
    model, cache = Tiny(plan).eval(), None
    with torch.no_grad(), watch(model) as seen:
        for chunk in chunks or tokens or (TOKENS,):
            cache = model(chunk, cache=cache, **inputs)
    return seen.recording


def errors(found):
    return [str(x) for x in found if x.level == "error"]


VALID = torch.ones(2, 12, dtype=torch.bool)
VALID[0, :4], VALID[1, 9:] = False, False  # padding on the left, and on the right
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 3 + [1] * 4 + [2] * 5])
STEPS = tuple(TOKENS.split([6, 3, 1, 1, 1], 1))
ALL = tuple(range(HEADS))

# fault, what the model is, what it is given, what the audit is told, what it must say
FAULTS = [
    ("polarity", {}, {}, {}, "error: mask polarity flipped"),
    ("polarity", {}, {}, {"expect": causal()}, "error: mask polarity flipped"),
    ("padding seen", {}, {"attention_mask": VALID}, {}, "error: weight on padding"),
    (
        "padding seen",
        {"causal": False},
        {"attention_mask": VALID},
        {"valid": VALID},
        "error: weight on padding",
    ),
    ("not causal", {}, {}, {}, "warning: weight on the future"),
    ("not causal", {}, {}, {"expect": causal()}, "error: weight on the future"),
    (
        "not causal",
        {"window": 3},
        {},
        {"expect": causal() & window(3)},
        "error: weight on the future",
    ),
    ("no diagonal", {}, {}, {}, "warning: own token hidden"),
    ("no diagonal", {}, {}, {"expect": causal()}, "error: own token hidden"),
    (
        "documents mixed",
        {},
        {"documents": DOCUMENTS},
        {"documents": DOCUMENTS},
        "error: weight on other documents",
    ),
    (
        "documents mixed",
        {},
        {"documents": DOCUMENTS},
        {"expect": causal() & same(DOCUMENTS)},
        "error: weight outside of expect",
    ),
    (
        "wide",
        {"window": 3},
        {},
        {"expect": causal() & window(3)},
        "error: window too wide",
    ),
    (
        "narrow",
        {"window": 3},
        {},
        {"expect": causal() & window(3)},
        "error: window too narrow",
    ),
    ("wide", {"window": 3}, {}, {}, "warning: windows differ by one"),
    ("narrow", {"window": 3}, {}, {}, "warning: windows differ by one"),
    ("softcap late", {"softcap": 5.0}, {}, {}, "error: softcap after the mask"),
    (
        "softcap late",
        {"softcap": 5.0},
        {},
        {"expect": causal()},
        "error: softcap after the mask",
    ),
    ("dead head", {}, {}, {}, "warning: dead head"),
    ("dead head", {"causal": False}, {}, {}, "warning: dead head"),
    ("saturated head", {}, {}, {}, "warning: saturated head"),
    ("row without keys", {}, {}, {}, "warning: empty rows"),
    ("top-left mask", {}, {"chunks": STEPS}, {}, "warning: cache misaligned"),
    (
        "top-left mask",
        {},
        {"chunks": STEPS},
        {"expect": causal()},
        "error: cache misaligned",
    ),
    ("is_causal with a cache", {}, {"chunks": STEPS}, {}, "warning: cache misaligned"),
]


def name(fault):
    return f"{fault[0]}{'-told' if fault[3] else ''}"


@pytest.mark.parametrize("place", [(1, (2,)), (0, (1, 3))], ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=name)
def test_a_planted_fault_is_found_in_its_layer_and_heads(fault, place):
    kind, model, given, told, words = fault
    layer, heads = place
    found = audit(record(Plan(kind, layer, heads, **model), **given), **told)
    said = {f"{x.level}: {x.what}": (x.layer, x.heads) for x in found}
    heads = ALL if kind == "is_causal with a cache" else heads
    assert said[words] == (f"layers.{layer}", heads)
    assert {x.layer for x in found} == {f"layers.{layer}"}  # and nowhere else
    also = {"empty rows", "windows differ by one"}  # what follows from some faults
    assert {x.what for x in found} - also <= {words.partition(": ")[2]}


@pytest.mark.parametrize("fault", FAULTS, ids=name)
def test_the_same_model_without_the_fault_is_clean(fault):
    _, model, given, told, _ = fault
    found = audit(record(Plan(**model), **given), **told)
    assert [str(x) for x in found if x.level != "note"] == []


def test_heads_that_are_tiled_are_found_beside_a_healthy_run():
    healthy = record(Plan())
    for layer in range(3):
        (found,) = compare(record(Plan("tiled heads", layer)), healthy)
        assert (found.what, found.layer) == ("head grouping differs", f"layers.{layer}")
        assert found.heads == (1, 2)  # the first and last see their own keys either way
    assert compare(healthy, record(Plan())) == ()


def test_positions_that_ignore_left_padding_are_found_beside_the_text_alone():
    alone, valid = TOKENS[:1, 4:], VALID[:1]

    def run(fault):
        padded = record(Plan(fault), TOKENS[:1], attention_mask=valid)
        return compare(padded, record(Plan(fault), alone))

    assert run("") == ()
    (found,) = run("positions not shifted")
    assert (found.what, found.layer) == ("positions differ", "layers.0")
    assert found.heads == ALL


def test_compare_tells_a_mask_from_an_input():
    healthy = record(Plan())
    (mask,) = compare(record(Plan("not causal")), healthy)
    assert (mask.what, mask.layer, mask.heads) == ("masks differ", "layers.1", (2,))
    (capped,) = compare(
        record(Plan("softcap late", softcap=5.0)), record(Plan(softcap=5.0))
    )
    assert (capped.what, capped.heads) == ("masks differ", (2,))
    (inputs,) = compare(record(Plan("dead head")), healthy)
    assert (inputs.what, inputs.layer) == ("inputs differ", "layers.1")


def test_a_row_of_nan_is_found_in_its_head():
    q, k = torch.randn(2, 4, 9, 8, generator=torch.manual_seed(0))
    healthy = make_record(q, k, causal())
    q = q.clone()
    q[2, 5] = math.nan
    sick = make_record(q, k, causal())
    assert audit(wrap(healthy)) == ()
    (found,) = audit(wrap(sick))
    assert (found.what, found.level, found.heads) == ("not finite", "error", (2,))
    assert found.numbers["query"] == 5


def test_nan_in_keys_that_nobody_sees_is_a_warning():
    q, k = torch.randn(2, 4, 9, 8, generator=torch.manual_seed(0))
    clean, seen = k.clone(), torch.ones(1, 9, 9, dtype=torch.bool)
    k[1, 8], seen[..., 8] = math.inf, False
    lse = attend(q[None], clean[None], clean[None], seen).lse[0]
    (found,) = audit(wrap(replace(make_record(q, k, seen), lse=lse)))
    assert (found.what, found.level, found.heads) == ("not finite", "warning", (1,))


def test_a_watched_layer_of_nan_is_named_first():
    found = audit(record(Plan("nan")))
    assert (found[0].what, found[0].layer) == ("not finite", "layers.1")
    assert {x.layer for x in found} <= {"layers.1", "layers.2"}


def make_record(q, k, mask=None, **more):
    """Return a record of (H, N, D) by the engine's own lse."""
    n = q.shape[1]
    lse = attend(q[None], k[None], k[None], mask, q_start=0, **more).lse[0]
    scale, at = 1 / math.sqrt(q.shape[-1]), torch.arange(n)
    given = {"q": q, "k": k, "lse": lse, "scale": scale, "mask": mask, **more}
    return Record(
        name="a", q_positions=at, k_positions=torch.arange(len(k[0])), **given
    )


def wrap(*records, **more):
    return Recording(
        model="Model", records=records, sequences=tuple(range(len(records))), **more
    )


def test_masses_are_those_of_the_matrix(rng):
    q, k = (torch.tensor(rng.normal(size=(4, 40, 8))) for _ in range(2))
    ids, at = torch.arange(40) // 15, torch.arange(40)
    recording = wrap(make_record(q, k, window(9, 4), softcap=3.0))
    seen = torch.tensor(window(9, 4).dense((40, 40)))
    s = 3 * torch.tanh(q @ k.mT / math.sqrt(8) / 3)
    weights = s.masked_fill(~seen, -math.inf).softmax(-1)
    cases = {
        "weight on other documents": ({"documents": ids}, ids[:, None] != ids),
        "weight on the future": ({"expect": causal()}, at > at[:, None]),
        "weight outside of expect": (
            {"expect": where(lambda _b, _h, q, k: (q + k) % 3 == 0)},
            (at + at[:, None]) % 3 != 0,
        ),
    }
    for what, (told, forbidden) in cases.items():
        (found,) = (x for x in audit(recording, **told) if x.what == what)
        dense = (weights * forbidden).sum(-1).amax(1)
        assert list(found.worst.values()) == pytest.approx(dense.tolist(), abs=1e-6)
        assert found.numbers["mass"] == max(found.worst.values())


def test_a_finding_has_the_worst_of_all_sequences():
    noise = torch.Generator().manual_seed(3)
    some = [make_record(*torch.randn(2, 3, 9, 8, generator=noise)) for _ in range(2)]
    one, other = (audit(wrap(x), expect=causal())[0] for x in some)
    (both,) = audit(wrap(*some), expect=causal())
    assert both.worst == {h: max(one.worst[h], other.worst[h]) for h in range(3)}
    assert one.worst[0] < other.worst[0]
    assert one.worst[2] > other.worst[2]  # so neither is the worst of both
    worse = one if one.numbers["mass"] > other.numbers["mass"] else other
    assert both.numbers["mass"] == worse.numbers["mass"]


def test_tiles_of_any_size_give_the_same_findings(monkeypatch):
    recording = record(Plan("documents mixed"), documents=DOCUMENTS)
    whole = audit(recording, documents=DOCUMENTS, expect=causal() & same(DOCUMENTS))
    both = compare(recording, record(Plan(), documents=DOCUMENTS))
    for module in (row_summary, sys.modules["regard.audit.compare"]):
        monkeypatch.setattr(module, "BLOCK", 5)
    cut = audit(recording, documents=DOCUMENTS, expect=causal() & same(DOCUMENTS))
    again = compare(recording, record(Plan(), documents=DOCUMENTS))
    for one, other in ((whole, cut), (both, again)):
        assert [(x.what, x.heads) for x in one] == [(x.what, x.heads) for x in other]
        for x, y in zip(one, other, strict=True):
            assert x.worst == pytest.approx(y.worst)
    assert whole
    assert both


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, torch.Tensor):
                self.size = max(self.size, x.untyped_storage().nbytes())
        return made


def test_no_square_is_ever_made():
    n = 3_000
    q, k = torch.randn(2, 1, n, 4)
    recording = wrap(make_record(q, k, causal()))
    with Largest() as largest:
        found = audit(recording, expect=causal() & window(99), documents=np.arange(n))
        assert compare(recording, recording) == ()
    assert {"weight on other documents", "window too wide"} <= {x.what for x in found}
    assert largest.size <= 8 * 256 * 512  # a tile of positions
    with Largest() as square:
        torch.zeros(n, n, dtype=torch.bool)
    assert square.size > largest.size


SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
IDS = (torch.arange(24).reshape(2, 12) * 7) % 47 + 2
RIGHT = VALID.flip(1) | torch.tensor([[False], [True]])


def build(kind, config, **sizes):
    torch.manual_seed(0)
    options = {**SIZES, **sizes}
    config = getattr(transformers, config)(**options)
    return getattr(transformers, kind)(config).eval()


def watch_run(model, **inputs):
    with torch.no_grad(), watch(model) as seen:
        model(**inputs)
    return seen.recording


def test_gpt2_is_healthy():
    model = build("GPT2LMHeadModel", "GPT2Config", n_positions=32)
    found = watch_run(model, input_ids=IDS)
    assert len(found.records) == 4
    assert errors(audit(found, expect=causal())) == []
    assert [x for x in audit(found) if x.level != "note"] == []


def test_llama_with_left_padding_is_healthy():
    model = build("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2)
    found = watch_run(model, input_ids=IDS, attention_mask=VALID.long())
    assert len(found.records) == 4
    assert errors(audit(found, valid=VALID, expect=causal())) == []
    alone = watch_run(model, input_ids=IDS[:1, 4:])
    first = replace(
        found,
        records=found.records[:2],
        sequences=found.sequences[:2],
        tokens=found.tokens[:1],
    )
    assert compare(first, alone) == ()


def test_mistral_counts_the_query_in_its_window():
    options = {"num_key_value_heads": 2, "sliding_window": 4}
    model = build("MistralForCausalLM", "MistralConfig", **options)
    found = watch_run(model, input_ids=IDS)
    assert audit(found, expect=causal() & window(3)) == ()
    wrong = audit(found, expect=causal() & window(4))  # as if it did not
    assert {(x.what, x.numbers["keys"]) for x in wrong} == {("window too narrow", 1)}
    wrong = audit(found, expect=causal() & window(2))
    assert {(x.what, x.numbers["keys"]) for x in wrong} == {("window too wide", 1)}


def test_bert_is_healthy_if_it_is_told_of_its_padding():
    model = build("BertModel", "BertConfig", max_position_embeddings=32)
    ids = IDS.masked_fill(~RIGHT, 0)
    told = watch_run(model, input_ids=ids, attention_mask=RIGHT.long())
    assert errors(audit(told, valid=RIGHT)) == []
    alone = watch_run(model, input_ids=ids)  # as many forget
    for options in ({"valid": RIGHT}, {"pad": 0}):
        found = audit(alone, **options)
        assert [(x.what, x.heads) for x in found] == [("weight on padding", ALL)] * 2
    assert audit(alone) == ()  # nobody said what is padding


def test_t5_is_healthy():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = build("T5ForConditionalGeneration", "T5Config", **sizes)
    found = watch_run(
        model, input_ids=IDS, attention_mask=RIGHT.long(), decoder_input_ids=IDS[:, :7]
    )
    assert len(found.records) == 12
    both = {"encoder.*": RIGHT, "*EncDec*": RIGHT}
    rules = {"decoder.*.SelfAttention": causal(), "*EncDec*": padding(RIGHT)}
    assert errors(audit(found)) == []
    assert errors(audit(found, valid=both, expect=rules)) == []
    cross = [x for x in audit(found, expect=causal()) if "EncDec" in x.layer]
    assert errors(cross) == []  # causal() says nothing of other sequences
    assert "queries not placed" in {x.what for x in cross}


@pytest.mark.slow
def test_smollm_rests_on_its_first_token_and_has_no_fault(smollm):
    model, tokenizer = regard.load(smollm)
    text = "The capital of France is Paris, and the capital of Italy is"
    recording = watch_run(model, tokens=torch.tensor([tokenizer.encode(text)]))
    assert len(recording.records) == 30
    found = audit(recording, expect=causal())
    assert errors(found) == []
    sinks = {x.layer: x.heads for x in found if x.what == "sink"}
    assert sum(map(len, sinks.values())) > 10
    assert {x.level for x in found if x.what == "sink"} == {"note"}


class CausalTiny(Tiny):
    pass


def test_a_language_model_of_which_no_layer_is_causal_is_named():
    def run(kind):
        model = kind(Plan(causal=False)).eval()
        return [str(x) for x in audit(watch_run(model, input_ids=TOKENS))]

    assert run(Tiny) == []  # it may be an encoder
    found = run(CausalTiny)
    assert len(found) == 3
    assert all(x.startswith("warning: weight on the future") for x in found)


def test_padding_that_is_not_taken_out_counts_exactly():
    q, k = torch.randn(2, 2, 10, 8, generator=torch.manual_seed(1))
    valid = torch.arange(10)[None] < 7
    (found,) = audit(wrap(make_record(q, k)), valid=valid)
    weights = (q @ k.mT / math.sqrt(8)).softmax(-1)
    dense = weights[:, :7, 7:].sum(-1).amax(1)  # rows of padding do not count
    assert found.what == "weight on padding"
    assert list(found.worst.values()) == pytest.approx(dense.tolist())


def test_a_padding_token_inside_of_a_text_is_a_token():
    q, k = torch.randn(2, 2, 6, 8, generator=torch.manual_seed(1))
    recording = wrap(make_record(q, k), tokens=((5, 6, 0, 7, 0, 0),))
    (found,) = audit(recording, pad=0)
    weights = (q @ k.mT / math.sqrt(8)).softmax(-1)
    assert found.worst[0] == pytest.approx(float(weights[0, :4, 4:].sum(-1).max()))


def test_empty_rows_are_an_error_once_it_is_said_that_they_are_tokens():
    plan = Plan("row without keys")
    told = audit(record(plan), valid=torch.ones(2, 12, dtype=torch.bool))
    assert [(x.level, x.what) for x in told] == [("error", "empty rows")]
    padding_rows = torch.ones(2, 12, dtype=torch.bool)
    padding_rows[:, 5] = False
    found = audit(record(plan), valid=padding_rows)
    assert "empty rows" not in {x.what for x in found}


def test_masks_that_are_added_hide_as_well_as_others():
    q, k = torch.randn(2, 2, 12, 8, generator=torch.manual_seed(0))
    far = ~torch.tensor((causal() & window(2)).dense((1, 12, 12)))
    for fill in (-1e9, -math.inf, torch.finfo(torch.float32).min):
        s = (q @ k.mT / math.sqrt(8)).masked_fill(far, fill)
        logits = replace(  # as they are seen at a softmax
            make_record(q, k),
            q=s,
            k=torch.eye(12)[None],
            scale=1.0,
            lse=s.logsumexp(-1),
        )
        bias = torch.zeros(1, 12, 12).masked_fill(far, max(fill, -1e9))
        for added in (logits, make_record(q, k, bias=bias)):
            assert audit(wrap(added), expect=causal() & window(2)) == ()
            (found,) = audit(wrap(added), expect=causal() & window(3))
            assert (found.what, found.heads) == ("window too narrow", (0, 1))


def test_heads_of_width_1_are_no_logits():
    q, k = torch.randn(2, 1, 12, 1, generator=torch.manual_seed(0))
    assert audit(wrap(make_record(q, k, causal()))) == ()
    assert find_columns(torch.ones(1, 3, 1)) is None
    assert find_columns(torch.eye(3)[None] * 2) is None
    assert find_columns(torch.eye(3)[None, 1:]).tolist() == [1, 2]


@pytest.mark.parametrize(("n_q", "n_k"), [(0, 0), (0, 6), (6, 0)])
def test_a_sequence_of_padding_alone_does_not_end_the_audit(n_q, n_k):
    q, k = torch.randn(2, 2, 6, 8, generator=torch.manual_seed(0))
    whole = make_record(q, k, causal())
    nothing = replace(
        whole,
        q=q[:, :n_q],
        k=k[:, :n_k],
        lse=torch.full((2, n_q), -math.inf),
        q_positions=torch.arange(n_q),
        k_positions=torch.arange(n_k),
    )
    recording = wrap(nothing, whole, tokens=((), (1, 2, 3, 4, 5, 6)))
    expected = [("empty rows", 0)] if n_q else []
    for options in ({}, {"expect": causal()}, {"pad": 0} if not n_k else {}):
        found = audit(recording, **options)
        assert [(x.what, x.numbers["sequence"]) for x in found] == expected


def test_positions_may_be_short_numbers():
    q, k = torch.randn(2, 2, 12, 8, generator=torch.manual_seed(0))
    whole, at = make_record(q, k), torch.arange(12).int()
    short = replace(whole, q_positions=at, k_positions=at)
    assert audit(wrap(short), expect=causal()) == audit(wrap(whole), expect=causal())


def test_a_bias_counts():
    q, k = torch.randn(2, 2, 12, 8, generator=torch.manual_seed(0))
    whole = make_record(q, k, causal(), bias=torch.randn(2, 12, 12))
    assert audit(wrap(whole)) == ()
    assert audit(wrap(replace(whole, bias=None))) != ()


def test_each_head_may_have_its_own_rule():
    recording = record(Plan("not causal"))
    free = per_head([causal(), causal(), everything(), causal()])
    rules = {"layers.1": free, "layers.[02]": causal()}
    assert audit(recording, expect=rules) == ()
    assert errors(audit(recording, expect=causal())) != []


def test_documents_are_counted_with_the_padding_that_is_gone():
    inputs = {"attention_mask": VALID, "documents": DOCUMENTS}
    told = {"valid": VALID, "documents": DOCUMENTS}
    assert audit(record(Plan(), **inputs), **told) == ()
    (found,) = audit(record(Plan("documents mixed"), **inputs), **told)
    assert found.what == "weight on other documents"


def test_padding_that_is_hidden_is_not_missed():
    q, k = torch.randn(2, 2, 10, 8, generator=torch.manual_seed(1))
    valid = torch.arange(10)[None] >= 3
    recording = wrap(make_record(q, k, causal() & padding(valid)))
    assert audit(recording, valid=valid, expect=causal()) == ()
    missed = {x.what for x in audit(recording, expect=causal())}
    assert missed == {"expected keys hidden", "empty rows"}


def test_a_learned_sink_takes_its_share_of_the_sum():
    q, k = torch.randn(2, 3, 9, 8, generator=torch.manual_seed(0))
    whole = make_record(q, k, causal(), sink=torch.tensor([0.0, 1.0, 2.0]))
    assert audit(wrap(whole)) == ()
    (found,) = audit(wrap(replace(whole, sink=None)))  # then something is missing
    assert (found.what, found.heads) == ("weight on padding", (0, 1, 2))


def test_rows_that_hold_more_than_1_are_named():
    whole = make_record(*torch.randn(2, 3, 9, 8, generator=torch.manual_seed(0)))
    lse = whole.lse.clone()
    lse[1, 4] -= 1
    (found,) = audit(wrap(replace(whole, lse=lse)))
    assert (found.what, found.heads) == ("rows do not sum to 1", (1,))
    assert found.numbers["off by"] == pytest.approx(math.e - 1, abs=1e-4)


def test_rounding_of_large_logits_is_no_fault():
    noise = torch.randn(2, 3, 50, 128, generator=torch.manual_seed(0))
    for offset, seen in ((100, 0.1), (0, 0.01)):  # logits of 100,000, and of 10
        whole = make_record(*(noise + offset))
        near = replace(whole, lse=whole.lse + 0.1 * seen)
        far = replace(whole, lse=whole.lse + seen)
        quiet, loud = ({x.what for x in audit(wrap(x))} for x in (near, far))
        assert loud - quiet == {"weight on padding"}


def test_what_was_not_seen_is_named():
    unheard = Covered(name="b", via="", reason="it was never heard")
    (found,) = audit(wrap(coverage=(unheard,)))
    assert (found.what, found.layer, found.level) == ("not audited", "b", "warning")
    with pytest.raises(OptionError, match="holds no layers"):
        audit(wrap())


def test_rows_in_the_middle_of_a_text_are_noted():
    whole = make_record(*torch.randn(2, 2, 9, 8), causal())
    late = slice(4, 9)
    part = replace(
        whole,
        q=whole.q[:, late],
        lse=whole.lse[:, late],
        q_positions=whole.q_positions[late],
    )
    (found,) = audit(wrap(part), expect=causal())
    assert (found.what, found.level) == ("positions do not start at 0", "note")


def test_an_opened_recording_is_audited_alike(tmp_path):
    recording = record(Plan("documents mixed"), documents=DOCUMENTS)
    regard.seen.Seen(recording).save(tmp_path / "run.safetensors")
    opened = regard.seen.open_seen(tmp_path / "run.safetensors").recording
    assert isinstance(opened.records[0].q, np.ndarray)
    rules = {
        "documents": DOCUMENTS.numpy(),
        "expect": causal() & same(DOCUMENTS.numpy()),
    }
    assert audit(opened, **rules) == audit(recording, **rules) != ()


def test_a_finding_reads_as_a_sentence():
    (found,) = audit(record(Plan("not causal")), expect=causal())
    number = f"{found.numbers['mass']:.4g}"
    assert str(found) == (
        f"error: weight on the future in layers.1, heads 2: mass {number}, rows 11, "
        "sequence 0, query 0. Mask it with is_causal=True or causal(). It is right "
        "only in an encoder."
    )
    assert all(x.endswith((".", "?")) for x in ADVICE.values())


def test_what_does_not_fit_is_refused():
    recording = record(Plan())
    with pytest.raises(OptionError, match=r'no layer is called "decoder\.\*"'):
        audit(recording, expect={"decoder.*": causal()})
    with pytest.raises(OptionError, match="expect is a Tensor, expected a mask"):
        audit(recording, expect=torch.ones(12, 12))
    with pytest.raises(MaskError, match=r"of True and False"):
        audit(recording, valid=VALID.long())
    with pytest.raises(ShapeError, match=r"for 12 tokens, and layers\.0 has 6 keys"):
        audit(record(Plan(), TOKENS[:, :6]), documents=DOCUMENTS)
    with pytest.raises(ShapeError, match="valid is for 1 sequences"):
        audit(recording, valid=torch.ones(1, 12, dtype=torch.bool))
    with pytest.raises(MaskError, match="does not reach all of layers"):
        audit(recording, expect=same(torch.zeros(5).long()))
    for unknown in ((), ((), ())):
        with pytest.raises(OptionError, match="tokens of sequence 0 are not known"):
            audit(replace(recording, tokens=unknown), pad=0)
    with pytest.raises(OptionError, match="valid= and pad= together: give one"):
        audit(recording, valid=torch.ones(2, 12, dtype=torch.bool), pad=0)
    late = array(torch.ones(8, 12, dtype=torch.bool), q_start=4)
    with pytest.raises(MaskError, match="queries 0 to 11 and keys 0 to 11 in sequence"):
        audit(recording, expect=late)
    nowhere = padding(torch.ones(2, 0, dtype=torch.bool))
    with pytest.raises(MaskError, match="does not reach all of layers"):
        audit(recording, expect=nowhere)
    with pytest.raises(OptionError, match="different tokens"):
        compare(recording, record(Plan(), TOKENS.flip(1)))
    with pytest.raises(ShapeError, match="6 in the other, expected the same"):
        compare(
            replace(recording, tokens=()),
            replace(record(Plan(), TOKENS[:, :6]), tokens=()),
        )
    with pytest.raises(OptionError, match="no layer in common"):
        compare(recording, wrap(make_record(*torch.randn(2, 2, 9, 8))))
