"""regard doctor: promises hold here, and each injected fault is detected and named."""

import dataclasses
import getpass
import json
import math
import platform
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from torch.utils._python_dispatch import TorchDispatchMode

from regard.__main__ import main
from regard.doctor import (
    examine,
    memory_and_time,
    statistics_results,
    watched_families,
    watched_generations,
)
from regard.doctor.device_arithmetic import check_arithmetic
from regard.doctor.engine_results import check_engine
from regard.doctor.examine import CHECKS, examine_devices, run_check
from regard.doctor.examined import Examination, Trial, write_error
from regard.doctor.memory_and_time import check_memory, compare_times
from regard.doctor.statistics_results import check_recorded_statistics
from regard.doctor.watched_families import FAMILIES, check_family
from regard.doctor.watched_generations import REMOVED, check_generation
from regard.engine import flash
from regard.errors import OptionError
from regard.run import attention_interface
from regard.seen import Seen
from regard.stats.registry import list_statistics

CPU = torch.device("cpu")
RIGHT = flash.forward
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}


@pytest.fixture(scope="module")
def report():
    return examine_devices(["cpu"])


def broken(results):
    return {x.subject: x.says for x in results if x.verdict == "broken"}


def test_every_promise_holds_on_this_machine(report):
    assert not broken(report.trials), str(report)
    assert report.ok
    tried = {x.promise for x in report.trials}
    assert tried >= CHECKS.keys() - {
        "watched models are unchanged, and their weights are right",  # two promises
        "generations are recorded and edited as they run",  # two promises
    }
    assert {x.subject for x in report.trials} >= {x.name for x in FAMILIES}
    assert len(FAMILIES) == 10
    assert not [x for x in report.trials if x.verdict == "not run"]


def test_the_report_as_text_ends_with_the_conclusion(report):
    lines = str(report).splitlines()
    assert lines[0] == f"cpu ({platform.machine()})"
    assert lines[-1].startswith("cpu: ")
    assert lines[-1].endswith(f"({len(report.trials)} in all)")
    assert all(x.subject in str(report) for x in report.trials)


def test_the_report_contains_nothing_private(report):
    error = FileNotFoundError(f"no file {Path.home()}/secret/notes.txt for 'x'")
    private = Trial("p", "s", "cpu", says=write_error(error))
    text = Examination((*report.trials, private), 1.0).to_json()
    found = json.loads(text)
    assert set(found) == {
        *("versions", "python", "system", "processor", "devices", "seconds", "results")
    }
    assert (
        found["results"][-1]["says"] == "FileNotFoundError: no file notes.txt for 'x'"
    )
    for word in (platform.node(), str(Path.home()), str(Path.cwd()), "secret"):
        assert word not in text
    assert f'"{getpass.getuser()}"' not in text


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (r"cannot open C:\Users\ada\w.gguf now", "cannot open w.gguf now"),
        ("'/root/a b' and /x/y/z: no", "'a b' and z: no"),
        ("a / b is 1/2", "a / b is 1/2"),
    ],
)
def test_paths_are_removed_from_messages(text, kept):
    assert write_error(ValueError(text)) == f"ValueError: {kept}"


# --- faults of a kernel ---------------------------------------------------------------


def lse_in_base_2(*args, **options):
    out, lse = RIGHT(*args, **options)
    return out, lse / math.log(2)


def drop_last_tile(q, k, v, *args, attn_mask=None, scale=None):
    kept = max(1, (k.shape[-2] - 1) // 64 * 64)
    if attn_mask is not None:
        attn_mask = attn_mask[..., :kept]
    k, v = k[..., :kept, :].contiguous(), v[..., :kept, :].contiguous()
    return RIGHT(q, k, v, *args, attn_mask=attn_mask, scale=scale)


def drop_last_queries(q, *args, **options):
    out, lse = RIGHT(q, *args, **options)
    out = out.clone()
    out[..., max(1, (q.shape[-2] - 1) // 64 * 64) :, :] = 0
    return out, lse


def round_inputs(q, k, v, *args, **options):
    q, k, v = (x.bfloat16().to(x.dtype) for x in (q, k, v))
    return RIGHT(q, k, v, *args, **options)


FAULTS = {
    lse_in_base_2: "lse is a base-2 logarithm, expected the natural one.",
    drop_last_tile: "The last 44 keys are missing: the kernel drops its last tile.",
    drop_last_queries: "The last 1 queries are 0: the kernel drops its last tile.",
    round_inputs: "The device rounds: its inputs are rounded to bfloat16.",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda x: x.__name__)
def test_a_fault_of_the_kernel_is_detected_and_named(fault, monkeypatch):
    monkeypatch.setattr(flash, "forward", fault)
    assert broken(check_engine(CPU))["all keys, float32"] == FAULTS[fault]


def test_a_fault_without_a_name_is_not_given_one(monkeypatch):
    monkeypatch.setattr(
        flash, "forward", lambda q, k, v, *a, **o: RIGHT(q, k, -v, *a, **o)
    )
    says = broken(check_engine(CPU))["all keys, float32"]
    assert says.startswith("The fault is not a known one; out differs by up to ")


def test_a_wrong_gradient_is_detected(monkeypatch):
    right = flash.backward
    monkeypatch.setattr(
        flash, "backward", lambda *a, **o: tuple(2 * x for x in right(*a, **o))
    )
    found = broken(check_engine(CPU))
    assert set(found) == {x for x in found if x.endswith("gradients")}
    assert "causal, gradients" in found


class RoundingDevice(TorchDispatchMode):
    """Rounds the inputs of each matrix product to bfloat16, as some devices do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in PRODUCTS:
            args = [
                x.bfloat16().float()
                if isinstance(x, torch.Tensor) and x.dtype == torch.float32
                else x
                for x in args
            ]
        return func(*args, **(kwargs or {}))


def test_a_device_that_rounds_is_detected_and_named():
    with RoundingDevice():
        found = broken(check_arithmetic(CPU))
    assert list(found) == ["matrix product, float32"]
    words = "The device rounds: its inputs are rounded to bfloat16."
    assert found["matrix product, float32"].startswith(words)


# --- faults of the lens, the statistics, memory and time ------------------------------


def test_a_model_that_changes_while_it_is_watched_is_detected(monkeypatch):
    real = watched_families.watch

    def watch(model):
        with torch.no_grad():
            next(model.parameters()).add_(1e-3)
        return real(model)

    monkeypatch.setattr(watched_families, "watch", watch)
    found = next(check_family(FAMILIES[6], CPU))
    assert (found.verdict, found.measured) == ("broken", "outputs differ")
    assert found.says.startswith("Outputs differ by up to ")


def test_a_model_that_does_not_repeat_its_bits_is_not_judged(monkeypatch):
    real = watched_families.run_family

    def run(family, model, inputs):
        return [x + torch.rand(()) for x in real(family, model, inputs)]

    monkeypatch.setattr(watched_families, "run_family", run)
    found = next(check_family(FAMILIES[6], CPU))
    assert found.verdict == "not run"
    assert "does not repeat its own bits" in found.says


def test_wrong_weights_are_detected(monkeypatch):
    real = watched_families.list_eager_weights
    monkeypatch.setattr(
        watched_families, "list_eager_weights", lambda x: [w + 1e-4 for w in real(x)]
    )
    bits, weights = check_family(FAMILIES[6], CPU)
    assert (bits.verdict, weights.verdict) == ("holds", "broken")


def test_a_layer_that_was_not_recorded_is_detected(monkeypatch):
    real = watched_families.list_eager_weights
    monkeypatch.setattr(
        watched_families, "list_eager_weights", lambda x: [*real(x), real(x)[0]]
    )
    weights = list(check_family(FAMILIES[6], CPU))[1]
    assert weights.says == "2 of 3 layers were recorded."


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_heads_that_are_taken_for_queries_are_detected(name, monkeypatch):
    """transformers 5.23 packs heads into rows: a lens that does not know it is wrong."""
    if not hasattr(transformers.AttentionInterface, "get_interface"):
        pytest.skip("this version packs no heads")
    monkeypatch.setattr(attention_interface, "has_heads_as_rows", lambda _q: False)
    (family,) = (x for x in FAMILIES if x.name == name)
    found = check_generation(family, CPU)
    assert next(found).verdict == "broken"
    with pytest.raises(OptionError, match="Heads cannot be identified"):
        next(found)


def test_the_head_next_to_the_right_one_is_detected(monkeypatch):
    real = watched_generations.knock_out
    monkeypatch.setattr(
        watched_generations, "knock_out", lambda model, heads: real(model, [(0, 2)])
    )
    for family in (FAMILIES[0], FAMILIES[7]):
        found = list(check_generation(family, CPU))
        assert {x.verdict for x in found if x.promise == REMOVED} == {"broken"}


def test_a_wrong_statistic_is_detected(monkeypatch):
    real = statistics_results.define_record
    monkeypatch.setattr(
        statistics_results,
        "define_record",
        lambda x: dataclasses.replace(real(x), k=real(x).k.roll(1, -2)),
    )
    found = broken(check_recorded_statistics(CPU))
    missing = {x.name for x in list_statistics()} - set(found)
    assert missing <= {"logit"}  # the largest of all may be the same
    assert "received" in found


def test_an_lse_of_the_device_that_is_wrong_is_detected(monkeypatch):
    real = statistics_results.record_model

    def record(device):
        seen = real(device)
        one, *rest = seen.recording.records
        wrong = dataclasses.replace(one, lse=one.lse + 0.01)
        return Seen(dataclasses.replace(seen.recording, records=(wrong, *rest)))

    monkeypatch.setattr(statistics_results, "record_model", record)
    assert "received" in broken(check_recorded_statistics(CPU))


def test_memory_that_grows_with_the_square_is_detected(monkeypatch):
    def dense(q, k, v, mask, *, q_start):
        torch.softmax(q @ k.mT, -1) @ v

    monkeypatch.setattr(memory_and_time, "attend", dense)
    (found,) = check_memory(CPU)
    assert found.verdict == "broken"


def test_a_slow_side_is_slow_not_broken():
    x = torch.ones(64, 64)
    found = compare_times("s", lambda: [x @ x for _ in range(9)], lambda: x @ x, CPU)
    assert found.verdict == "slow"


def test_an_exception_is_a_result_and_the_other_checks_go_on(monkeypatch):
    def fail(device):
        raise RuntimeError("no kernel image")
        yield

    monkeypatch.setattr(examine, "CHECKS", {"one": fail, "two": check_arithmetic})
    report = examine_devices(["cpu"])
    assert report.trials[0].says == "RuntimeError: no kernel image"
    assert [x.verdict for x in report.trials] == ["broken", *["holds"] * 4]
    assert not report.ok


def test_a_missing_transformers_is_not_a_broken_promise(monkeypatch):
    monkeypatch.setattr(watched_families, "find_spec", lambda _: None)
    found = list(run_check("p", watched_families.check_families, CPU))
    assert {x.verdict for x in found} == {"not run"}
    assert 'pip install "regard[hf]"' in found[0].says


# --- the command ----------------------------------------------------------------------


def test_the_command_writes_a_report_and_exits_with_the_verdict(monkeypatch, tmp_path):
    monkeypatch.setattr(examine, "CHECKS", {"arithmetic": check_arithmetic})
    file = tmp_path / "doctor.json"
    done = CliRunner().invoke(
        main, ["doctor", "--device", "cpu", "--report", str(file)]
    )
    assert done.exit_code == 0, done.output
    assert "cpu: 4 holds (4 in all)" in done.output
    assert "nothing was sent" in done.output
    assert len(json.loads(file.read_text("utf-8"))["results"]) == 4
    with RoundingDevice():
        done = CliRunner().invoke(main, ["doctor", "--device", "cpu"])
    assert done.exit_code == 1
    assert "cpu: 1 broken, 3 holds (4 in all)" in done.output


def test_a_device_that_torch_does_not_find_is_refused():
    with pytest.raises(OptionError, match="torch finds cpu here"):
        examine_devices(["cuda"])
