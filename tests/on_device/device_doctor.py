"""regard doctor on the simulated device: promises hold, and faults of it are named.

Next: ../test_simulated_device.py
"""

import math
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from test_doctor import RoundingDevice, broken

from regard.__main__ import main
from regard.doctor import examine
from regard.doctor.device_arithmetic import check_arithmetic
from regard.doctor.engine_results import check_engine
from regard.doctor.examine import examine_devices
from regard.engine import device_operators
from regard.errors import OptionError

SIM = torch.device("sim")


def test_every_promise_holds_on_the_device():
    report = examine_devices(["sim"])
    assert not broken(report.trials), str(report)
    skipped = {x.subject for x in report.trials if x.verdict == "not run"}
    assert skipped <= {"engine, 4,096 tokens"}, str(report)  # it has no such counter
    assert {x.device for x in report.trials} == {"sim"}


def test_it_is_found_beside_the_cpu():
    assert examine.find_devices() == ["cpu", "sim"]
    with pytest.raises(OptionError, match="torch finds cpu and sim here"):
        examine_devices(["cuda"])


def lse_in_base_2(forward):
    def run(*args, **options):
        out, lse = forward(*args, **options)
        return out, lse / math.log(2)

    return run


def drop_last_tile(forward):
    def run(q, k, v, bias, *, causal, scale):
        kept = max(1, (k.shape[2] - 1) // 64 * 64)
        k, v = (x[:, :, :kept].contiguous() for x in (k, v))
        bias = None if bias is None else bias[..., :kept].contiguous()
        return forward(q, k, v, bias, causal=causal, scale=scale)

    return run


@pytest.mark.parametrize("fault", [lse_in_base_2, drop_last_tile])
def test_a_fault_of_the_operator_of_the_device_is_named(fault, monkeypatch):
    operators, key = device_operators.OPERATORS, device_operators.OVERRIDEABLE
    faulty = replace(operators[key], forward=fault(operators[key].forward))
    monkeypatch.setitem(operators, key, faulty)
    words = {
        lse_in_base_2: "lse is a base-2 logarithm, expected the natural one.",
        drop_last_tile: "The last 44 keys are missing: the kernel drops its last tile.",
    }
    assert broken(check_engine(SIM))["all keys, float32"] == words[fault]


def test_a_device_that_rounds_is_named():
    with RoundingDevice():
        found = broken(check_arithmetic(SIM))
    words = "The device rounds: its inputs are rounded to bfloat16."
    assert found["matrix product, float32"].startswith(words)


def test_the_command_reports_both_devices(monkeypatch):
    monkeypatch.setattr(examine, "CHECKS", {"arithmetic": check_arithmetic})
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 0, done.output
    assert "cpu: 4 holds (4 in all)" in done.output
    assert "sim: 4 holds (4 in all)" in done.output
