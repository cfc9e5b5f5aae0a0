"""A record proves itself: what is wrong in it does not agree with what the model knew."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import AutoModelForCausalLM, LlamaConfig

import regard
from regard.engine.choose import attend
from regard.masks import keys
from regard.recording.certificate import Outputs, certify, settle_lse
from regard.recording.evidence import Certificate, LseOrigin
from regard.recording.file import open_recording, save_recording
from regard.recording.record import Record, Recording
from regard.seen import Seen

H, HK, N, D = 4, 2, 48, 32
AT = torch.arange(N)
SIGNS = torch.where(torch.arange(D) % 3 == 0, -1.0, 1.0)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def make_record(dtype=torch.float32, seed=0):
    """Return a record of torch's own kernel, and what it returned."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, h, N, D, dtype=torch.float64) for h in (H, HK, HK))
    q, k, v = ((x * 2).to(dtype) for x in (q, k, v))
    shared = [x.repeat_interleave(H // HK, 1) for x in (k, v)]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse, *_ = kernel(q, *shared, 0.0, True)
    record = Record(
        name="layer",
        q=q[0],
        k=k[0],
        v=v[0],
        lse=lse[0],
        scale=D**-0.5,
        q_positions=AT,
        k_positions=AT,
        mask=regard.causal(),
        origin=LseOrigin.KERNEL,
    )
    wide = torch.promote_types(dtype, torch.float32)
    out, signs = out[0].to(wide), SIGNS.to(wide)
    return record, Outputs(
        rows=np.arange(N),
        out=out @ signs,
        size=out.norm(dim=-1),
        values=v[0].to(wide) @ signs,
        eps=torch.finfo(dtype).eps,
    )


def roll(x, axis):
    return torch.roll(x, 1, axis)


WRONG = {
    "stale keys": lambda x: replace(x, k=x.k + (AT > 20)[:, None] * roll(x.k, 1)),
    "keys of another sequence": lambda x: replace(x, k=make_record(seed=1)[0].k),
    "one head has the keys of another": lambda x: replace(x, k=x.k.flip(0)),
    "permuted heads": lambda x: replace(x, q=roll(x.q, 0)),
    "a shifted position": lambda x: replace(x, q_positions=AT + 1),
    "a lost mask": lambda x: replace(x, mask=None),
    "a lost bias": lambda x: replace(x, bias=torch.linspace(0, 4, N).expand(1, N, N)),
    "a wrong scale": lambda x: replace(x, scale=x.scale * 1.1),
    "lse of another row": lambda x: replace(x, lse=roll(x.lse, 1)),
    "lse of another base": lambda x: replace(x, lse=x.lse / np.log(2)),
    "a sink": lambda x: replace(x, sink=torch.full((H,), 2.0)),
    "a softcap": lambda x: replace(x, softcap=5.0),
    "a doubled key": lambda x: replace(
        x, k=torch.cat([x.k[:, :1], x.k[:, :-1]], 1), v=None
    ),
    "padding counted as a token": lambda x: replace(
        x, mask=regard.causal() & keys(1, N)
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_right_record_is_certified_by_its_sums_and_by_its_outputs(dtype):
    record, outputs = make_record(dtype)
    both = certify(record, np.arange(N), outputs)
    assert (both.by, both.rows) == ("row sums and outputs", 2 * H * N)
    assert (both.failed, both.unknown) == (0, 0)
    assert both.error < both.tolerance < both.power
    alone = certify(replace(record, origin=LseOrigin.RECORD), np.arange(N), outputs)
    assert (alone.by, alone.rows, alone.failed) == ("outputs", H * N, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_record_is_not_certified(name, dtype):
    record, outputs = make_record(dtype)
    wrong = WRONG[name](record)
    assert certify(wrong, np.arange(N)).failed
    if name != "a sink":  # it changes no output of a row whose lse is right
        alone = replace(wrong, origin=LseOrigin.RECORD)
        assert certify(alone, np.arange(N), outputs).failed


def test_a_log_sum_exp_of_the_record_itself_proves_nothing():
    record, _ = make_record()
    assert certify(replace(record, origin=LseOrigin.RECORD), np.arange(N)) is None


def test_rows_that_see_no_key_or_are_nan_are_judged():
    record, _ = make_record()
    lse = record.lse.clone()
    lse[:, 3] = -torch.inf
    assert certify(replace(record, lse=lse), np.array([3])).failed == H
    hidden = record.allowed().clone()
    hidden[:, 3] = False
    blind = replace(record, lse=lse, mask=hidden)
    assert certify(blind, np.arange(N)).failed == 0
    lse[:, 3] = torch.nan
    found = certify(replace(record, lse=lse), np.arange(N))
    assert (found.failed, found.unknown) == (0, H)


def test_a_key_of_nan_that_a_row_does_not_see_is_not_its_fault():
    record, _ = make_record()
    k, lse = record.k.clone(), record.lse.clone()
    k[:, 20], lse[:, 20:] = torch.nan, torch.nan
    found = certify(replace(record, k=k, lse=lse), np.arange(N))
    assert found.failed == 0
    assert found.unknown >= H * (N - 20)


def test_a_record_in_which_other_keys_would_not_be_noticed_cannot_tell():
    record, _ = make_record()
    flat = replace(record, q=record.q * 1e-6)
    seen = record.allowed().sum(-1)
    flat = replace(flat, lse=seen.log().expand(H, -1).float())
    found = certify(flat, np.arange(1, N))
    assert found.failed == 0
    assert found.unknown == found.rows
    assert found.power < found.tolerance


def test_a_certificate_is_saved_and_an_older_file_has_none(tmp_path, monkeypatch):
    record, outputs = make_record()
    made = replace(record, certificate=certify(record, np.arange(N), outputs))
    recording = Recording(model="M", records=(made,), sequences=(0,))
    save_recording(tmp_path / "new.safetensors", recording)
    found = open_recording(tmp_path / "new.safetensors").records[0]
    assert found.certificate == made.certificate
    assert found.origin is LseOrigin.KERNEL
    odd = Certificate(by="outputs", rows=1, failed=1, error=np.inf, power=np.nan)
    recording = replace(recording, records=(replace(made, certificate=odd),))
    save_recording(tmp_path / "odd.safetensors", recording)
    found = open_recording(tmp_path / "odd.safetensors").records[0].certificate
    assert found.error == np.inf
    assert np.isnan(found.power)
    assert "not certified" in str(Seen(replace(recording, records=(record,))))


# --- the records of a watch -----------------------------------------------------------


def make_llama(attention="sdpa", dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=60,
        initializer_range=0.4,
        attn_implementation=attention,
    )
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


@pytest.mark.parametrize("keep", ["qk", "qkv"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_head_of_every_call_of_a_generation_is_certified(attention, keep):
    model, ids = make_llama(attention), torch.randint(0, 60, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad(), regard.watch(model, keep=keep) as seen:
        model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    for record in seen.records:
        found = record.certificate
        assert (found.failed, found.unknown) == (0, 0)
        # four rows of the first call, and one of each of the other four
        assert found.rows >= 4 * (3 + 4)
    assert "0 failed, 0 cannot tell; 2 of 2 layers, 46 of 52 rows kept" in str(seen)
    assert "6 of padding" in str(seen)


def test_a_kernel_without_a_log_sum_exp_is_certified_by_its_outputs():
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    with regard.watch(model) as seen:
        model(torch.randn(2, 5, 16, requires_grad=True))
    softcapped = Softcapped()
    with regard.watch(softcapped) as capped:
        softcapped(torch.randn(1, 2, 6, 8))
    assert capped.records[0].origin is LseOrigin.RECORD
    assert capped.records[0].certificate.by == "outputs"
    assert not capped.records[0].certificate.failed
    assert seen.records[0].certificate.failed == 0


class Softcapped(nn.Module):
    def forward(self, x):
        return attend(x, x, x, softcap=5.0).out


def test_a_layer_that_contradicts_the_model_is_not_shown():
    """Keys that change behind their fingerprint: found by nothing but the sums."""

    class Layer(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k)

    model, k = Layer(), torch.randn(1, 2, 6, 32)
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.randn(1, 2, 6, 32), k)
        changed = torch.cat([k, torch.randn(1, 2, 1, 32)], 2)
        changed[:, 1, 2, :4] += 6
        model(torch.randn(1, 2, 1, 32), changed)
    assert not seen.records
    (covered,) = seen.coverage()
    assert "its records contradict the model" in covered.reason
    assert covered.kept == covered.in_records == 0


@pytest.mark.parametrize(
    ("steps", "why"),
    [((6, 4), "8 taken back"), ((6, None), "0 failed")],
)
def test_every_row_is_in_a_record_or_is_counted(steps, why):
    model, ids = make_llama(), torch.randint(0, 60, (1, 6))
    with torch.no_grad(), regard.watch(model) as seen:
        cache = model(ids, use_cache=True).past_key_values
        if steps[1] is not None:
            cache.crop(-4)
            model(ids[:, :3], past_key_values=cache)
    assert why in str(seen)
    for covered in seen.coverage():
        lost = covered.rows - covered.in_records - sum(covered.left_out.values())
        assert lost == 0


def test_a_whole_row_that_is_shown_and_does_not_sum_to_1_is_nan():
    record, _ = make_record()
    assert torch.allclose(record.weights().sum(-1), torch.ones(H, N))
    lse = record.lse.clone()
    lse[2, 7] += 0.1
    wrong = replace(record, lse=lse)
    with pytest.warns(UserWarning, match="layer: 1 rows of heads do not sum to 1"):
        found = wrong.weights()
    assert found.isnan().all(-1).nonzero().tolist() == [[2, 7]]
    with pytest.warns(UserWarning, match="layer: 1 rows"):
        assert wrong.weights(7, 2).isnan().all()
    assert not wrong.weights(7, 2, keys=slice(3)).isnan().any()  # not a whole row
    seen = Seen(Recording(model="M", records=(wrong,), sequences=(0,)))
    with pytest.warns(UserWarning, match="layer: 1 rows"):
        assert seen.weights(0).isnan().any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_statistic_of_rows_that_do_not_sum_to_1_is_nan(name, dtype):
    record, _ = make_record(dtype)
    right = regard.stats.entropy(record)
    assert np.isfinite(np.asarray(right)).all()
    with pytest.warns(UserWarning, match="rows of heads do not sum to 1"):
        wrong = np.asarray(regard.stats.entropy(WRONG[name](record)))
    assert np.isnan(wrong).any()
    if name not in {"stale keys", "padding counted as a token"}:
        assert np.isnan(wrong).mean() > (0.2 if dtype is torch.float16 else 0.5)


def test_statistics_of_a_record_with_a_sink_are_shown():
    record, _ = make_record()
    sink = torch.linspace(-1, 2, H)
    lse = torch.logaddexp(record.lse, sink[:, None])
    whole = replace(record, lse=lse, sink=sink)
    assert np.isfinite(np.asarray(regard.stats.entropy(whole))).all()


def make_rounded(dtype):
    """Return a record whose lse is that of logits which a model rounded."""
    record, _ = make_record(dtype)
    shared = record.k.repeat_interleave(H // HK, 0)
    logits = record.q @ shared.mT * D**-0.5  # rounded twice
    lse = logits.masked_fill(AT[:, None] < AT, -torch.inf).float().logsumexp(-1)
    return replace(record, lse=lse, origin=LseOrigin.LOGITS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_rounded_logits_are_all_checked_and_then_sum_to_1(dtype):
    record = make_rounded(dtype)
    sums = record.weights().sum(-1)
    assert float((sums - 1).abs().max()) > 1e-4
    settled, found = settle_lse(record, certify(record, np.arange(3)))
    assert settled.origin is LseOrigin.RECORD
    assert found.rows == H * 3
    torch.testing.assert_close(settled.weights().sum(-1), torch.ones(H, N))
    torch.testing.assert_close(settled.weights().float(), define(record))
    q = record.q.clone()
    q[1, 30] = q[1, 29]
    wrong = replace(record, q=q)
    assert not certify(wrong, np.arange(3)).failed  # this row is not among them
    same, failed = settle_lse(wrong, certify(wrong, np.arange(3)))
    assert (failed.failed, failed.rows, same.origin) == (1, H * N, record.origin)


def define(record):
    """Return the weights of the definition."""
    shared = record.k.float().repeat_interleave(H // HK, 0)
    logits = record.q.float() @ shared.mT * D**-0.5
    return logits.masked_fill(AT[:, None] < AT, -torch.inf).softmax(-1)


@pytest.mark.parametrize("origin", [LseOrigin.KERNEL, LseOrigin.RECORD])
def test_a_log_sum_exp_of_a_kernel_is_kept(origin):
    record = replace(make_rounded(torch.float16), origin=origin)
    found = certify(make_record()[0], np.arange(3))
    assert settle_lse(record, found) == (record, found)
