"""Training: the loop, what a kill leaves behind, many processes, and the curve."""

import json
import math
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from train_worker import STEPS, Ragged, group, make_model

from regard.errors import FileError, OptionError, ShapeError
from regard.nn.checkpoint import NAME, load_model, read_checkpoint, write_checkpoint
from regard.nn.tasks import Copy, Reverse
from regard.nn.train import (
    Objective,
    Plan,
    ProcessGroup,
    evaluate_loss,
    make_optimizer,
    take_step,
    train,
)
from regard.show import loss_curve as curve

WORKER = str(Path(__file__).parent / "train_worker.py")
QUICK = Plan(steps=12, batch=6, warmup=3, save_every=5)
TASK = Copy(4)


def quietly(model, task=TASK, plan=QUICK, folder=None, watch=None):
    return train(model, task, plan, folder, show=False, watch=watch)


def start(*arguments, torchrun=0):
    many = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={torchrun}",
    ]
    return subprocess.Popen(
        [sys.executable, *(many if torchrun else []), WORKER, *map(str, arguments)],
        env={**os.environ, "PYTHONWARNINGS": "error::FutureWarning"},
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process):
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return said


def flatten(arrays):
    return torch.cat([x.detach().flatten() for x in arrays])


def same_bits(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(one[k], other[k]) for k in one
    )


# the loop


def test_the_rate_rises_in_a_line_and_falls_in_half_a_wave():
    plan = Plan(steps=111, warmup=10, rate=2.0, floor=0.25)
    assert [plan.rate_at(i) for i in range(10)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
    )
    assert plan.rate_at(10) == 2.0
    assert plan.rate_at(60) == pytest.approx(1.25)  # halfway between 2 and 0.5
    assert plan.rate_at(35) == pytest.approx(0.5 + 1.5 * (1 + math.sqrt(0.5)) / 2)
    assert plan.rate_at(110) == pytest.approx(0.5)
    assert Plan(steps=1, warmup=0, rate=2.0).rate_at(0) == 2.0


def test_a_step_moves_the_weights_by_its_rate():
    model = make_model(TASK)
    before = flatten(model.parameters())
    plan = replace(QUICK, warmup=4, weight_decay=0.0, rate=0.5)
    optimizer = make_optimizer(model, plan)
    take_step(Objective(model), optimizer, TASK, plan, step=0, group=ProcessGroup())
    moved = (flatten(model.parameters()) - before).abs()
    assert float(moved.max()) == pytest.approx(0.125, rel=1e-3)
    assert float(moved.median()) == pytest.approx(0.125, rel=1e-2)  # AdamW: ± rate


def test_only_matrices_decay():
    model = make_model(TASK, tied=False, position="learned")
    decayed, free = make_optimizer(model, Plan(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.3, 0.0)
    names = {id(x): name for name, x in model.named_parameters()}
    assert sorted(names[id(x)] for x in decayed["params"]) == sorted(
        ["head.weight"]
        + [
            f"blocks.{i}.{matrix}.weight"
            for i in range(2)
            for matrix in ("attention.qkv", "attention.out", "feed.up", "feed.down")
        ]
    )
    assert len(decayed["params"]) + len(free["params"]) == len(names)


def test_the_loss_is_the_mean_over_the_answer_tokens_of_the_whole_batch():
    task = Ragged(4)
    model = make_model(task).double()
    tokens, answers = task.batch(6, QUICK.seed, 0)
    logits = model(tokens).detach().log_softmax(-1)
    expected = [
        -float(logits[i, j - 1, tokens[i, j]]) for i, j in answers.nonzero().tolist()
    ]
    assert len(expected) not in (24, 0)
    loss = quietly(model, task, replace(QUICK, steps=1, warmup=0, accumulate=4))[0]
    assert loss == pytest.approx(sum(expected) / len(expected), abs=1e-12)


def test_accumulation_equals_the_whole_batch():
    task, results = Ragged(4), []
    for parts in (1, 4):
        model = make_model(task).double()
        plan = replace(QUICK, batch=10, accumulate=parts)
        losses = quietly(model, task, plan)
        results.append((losses, flatten(model.parameters())))
    (losses, weights), (other_losses, other_weights) = results
    assert losses == pytest.approx(other_losses, abs=1e-10)
    torch.testing.assert_close(weights, other_weights, atol=1e-8, rtol=0)


@pytest.mark.parametrize("clip", [1e9, 0.01])
def test_the_gradient_is_clipped(clip):
    model = make_model(TASK)
    tokens, answers = TASK.batch(QUICK.batch, QUICK.seed, 0)
    loss = Objective(model)(tokens, answers) / answers.sum()
    whole = flatten(torch.autograd.grad(loss, list(model.parameters())))
    expected = whole * min(1.0, clip / float(whole.norm()))
    optimizer, seen = make_optimizer(model, QUICK), []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(flatten(x.grad for x in model.parameters()))
    )
    plan = replace(QUICK, clip=clip)
    take_step(Objective(model), optimizer, TASK, plan, step=0, group=ProcessGroup())
    assert 1 < float(whole.norm()) < 10
    torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-7)


def test_bfloat16_trains_and_keeps_the_weights_in_float32():
    model, plan = make_model(TASK), Plan(steps=60, rate=1e-2, warmup=5)
    losses = quietly(model, TASK, replace(plan, precision="bfloat16"))
    assert np.mean(losses[-5:]) < 0.8 * losses[0]
    assert {x.dtype for x in model.parameters()} == {torch.float32}
    exact = quietly(make_model(TASK), TASK, plan)
    assert losses != exact
    assert losses[:10] == pytest.approx(exact[:10], rel=0.02)


def test_dropout_is_on_in_training_and_the_callers_randomness_is_left_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    model = make_model(TASK, dropout=0.5)
    model.eval()
    torch.manual_seed(7)
    losses = quietly(model)
    assert torch.equal(torch.rand(3), expected)
    assert losses != quietly(make_model(TASK))
    assert losses == quietly(make_model(TASK, dropout=0.5))


def test_gradients_left_behind_by_others_do_not_count():
    model = make_model(TASK)
    model(torch.tensor([[1, 2]])).sum().backward()
    assert quietly(model) == quietly(make_model(TASK))


def test_evaluate_is_the_mean_loss_of_held_out_answers():
    task = Ragged(4)
    model = make_model(task, dropout=0.5)
    tokens, answers = task.batch(7, 0, 0, held_out=True)
    logits = model.eval()(tokens).detach().log_softmax(-1)
    model.train()
    each = -logits[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    expected = float(each[answers[:, 1:]].mean())
    assert evaluate_loss(model, task, 7, batch=3) == pytest.approx(expected, rel=1e-5)
    assert model.training


def test_a_run_that_diverges_says_so_and_keeps_the_weights():
    model = make_model(TASK)
    with torch.no_grad():
        model.embed.weight[:] = 1e30
    before = model.blocks[0].feed.up.weight.clone()
    with pytest.raises(OptionError, match=r"at step 0 the loss is .* Try a lower rate"):
        quietly(model)
    assert torch.equal(model.blocks[0].feed.up.weight, before)


def test_progress_is_shown_or_not(capsys):
    train(make_model(TASK), TASK, QUICK, show=False)
    assert capsys.readouterr().out == ""
    train(make_model(TASK), TASK, QUICK)
    out = capsys.readouterr().out
    assert "12 / 12 steps" in out
    assert "tokens/s" in out
    assert "loss" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, "steps=0, expected at least 1."),
        ({"rate": 0.0}, "rate=0.0, expected above 0."),
        ({"warmup": 2000}, "warmup=2000, expected at most 1000."),
        ({"floor": 1.5}, "floor=1.5, expected at most 1."),
        ({"seed": -1}, "seed=-1, expected at least 0."),
        ({"precision": "half"}, "precision='half', expected 'float32' or 'bfloat16'."),
    ],
)
def test_a_plan_refuses_what_cannot_be(options, words):
    with pytest.raises(OptionError) as error:
        Plan(**options)
    assert str(error.value) == words


def test_a_model_that_does_not_fit_the_task_is_refused():
    with pytest.raises(OptionError) as error:
        quietly(make_model(TASK, context=8))
    assert str(error.value) == (
        "the model has context=8, the task needs 9. Write Config(context=9, …)."
    )
    with pytest.raises(OptionError) as error:
        quietly(make_model(TASK), plan=replace(QUICK, accumulate=7))
    assert str(error.value) == (
        "batch=6 cannot be split into accumulate=7 parts for each of 1 processes. "
        "Make batch larger."
    )


# what a kill leaves behind


class PowerCutError(Exception):
    pass


def test_a_run_that_broke_off_goes_on_to_the_same_bits(tmp_path):
    def cut(step, loss):
        if step == 7:
            raise PowerCutError

    plan = replace(QUICK, accumulate=2)
    whole = make_model(TASK, dropout=0.2)
    losses = quietly(whole, plan=plan)
    with pytest.raises(PowerCutError):
        quietly(make_model(TASK, dropout=0.2), plan=plan, folder=tmp_path, watch=cut)
    assert len(read_checkpoint(tmp_path).losses) == 5
    steps = []
    resumed = make_model(TASK, dropout=0.2).apply(lambda x: None)
    assert losses == quietly(
        resumed, plan=plan, folder=tmp_path, watch=lambda *x: steps.append(x[0])
    )
    assert steps == list(range(5, 12))
    assert same_bits(resumed.state_dict(), whole.state_dict())
    assert same_bits(load_model(tmp_path).state_dict(), whole.state_dict())
    assert quietly(make_model(TASK, dropout=0.2), plan=plan, folder=tmp_path) == losses


def test_a_run_killed_again_and_again_ends_in_the_same_bits(tmp_path):
    whole = start("run", tmp_path / "whole")
    for target in sorted(random.Random(1).sample(range(3, STEPS - 8), 3)):
        run = start("run", tmp_path / "killed")
        for line in run.stdout:
            if int(line) >= target:
                run.send_signal(signal.SIGKILL)
                break
        run.communicate()
        assert run.returncode == -signal.SIGKILL
    first = int(finish(start("run", tmp_path / "killed")).split()[0])
    assert 0 < first < STEPS  # the last start did not begin again
    finish(whole)
    one, other = (load_file(tmp_path / name / NAME) for name in ("whole", "killed"))
    assert len(one["losses"]) == STEPS
    assert any(name.startswith("second.") for name in one)
    assert same_bits(one, other)


def test_ctrl_c_saves_and_the_same_call_goes_on(tmp_path):
    run = start("run", tmp_path)
    for line in run.stdout:
        if int(line) == 9:
            run.send_signal(signal.SIGINT)
            break
    *_, said = finish(run).splitlines()
    done = len(read_checkpoint(tmp_path).losses)
    assert 10 <= done < STEPS
    assert said == (
        f"stopped after {done} of 30 steps, saved in {tmp_path}; "
        "repeat the same call to resume."
    )
    rest = finish(start("run", tmp_path)).split()
    assert [int(x) for x in rest] == list(range(done, STEPS))


def test_a_stop_without_a_folder_says_that_nothing_is_saved():
    def interrupt(step, loss):
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as stop:
        quietly(make_model(TASK), watch=interrupt)
    assert str(stop.value) == (
        "stopped after 5 of 12 steps, nothing is saved: give a folder."
    )
    assert signal.getsignal(signal.SIGINT) is before


def test_a_kill_while_writing_leaves_a_whole_checkpoint(tmp_path):
    seen = json.loads(finish(start("kill", tmp_path)))
    assert seen["whole"] == seen["rounds"] >= 25
    assert seen["cut"] >= 3  # the kills did hit the writing


def spoil(path, how):
    raw = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(raw[: len(raw) // 2])
    elif how == "bit":
        raw[-1000] ^= 4
        path.write_bytes(raw)
    elif how == "plan":
        path.write_bytes(raw.replace(b'rate\\": 0.001', b'rate\\": 0.002'))
    elif how == "empty":
        path.write_bytes(b"")
    else:
        save_file({"x": torch.zeros(3)}, path)
    assert path.read_bytes() != raw or how == "bit"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("cut", "is damaged or not a safetensors file"),
        ("empty", "is damaged or not a safetensors file"),
        ("bit", "is damaged: its numbers do not match its checksum. Delete it"),
        ("plan", "is damaged: its numbers do not match its checksum. Delete it"),
        ("stranger", "is not a checkpoint of a training run. Move it elsewhere."),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path, how, words):
    quietly(make_model(TASK), folder=tmp_path)
    spoil(tmp_path / NAME, how)
    with pytest.raises(FileError, match=words):
        quietly(make_model(TASK), folder=tmp_path)
    with pytest.raises(FileError, match=words):
        load_model(tmp_path)


def test_a_whole_file_with_the_wrong_contents_is_refused(tmp_path):
    quietly(make_model(TASK), folder=tmp_path)
    saved = read_checkpoint(tmp_path)
    less = {k: v for k, v in saved.weights.items() if k != "norm.bias"}
    more = saved.first | {"nobody.weight": torch.zeros(3)}
    flat = saved.weights | {"embed.weight": torch.zeros(11 * 16)}
    future = {**saved.about, "config": {**saved.about["config"], "experts": 8}}
    wrong = {
        "does not hold the weights that its config describes": [
            replace(saved, weights=less),
            replace(saved, first=more),
            replace(saved, weights=flat),
            replace(saved, second={}),
        ],
        r"has a config unknown to this version \(.*'experts'\)": [
            replace(saved, about=future)
        ],
        "has a config unknown to this version": [replace(saved, about={})],
    }
    for words, checkpoints in wrong.items():
        for checkpoint in checkpoints:
            write_checkpoint(tmp_path, checkpoint)
            with pytest.raises(FileError, match=words):
                quietly(make_model(TASK), folder=tmp_path)
            with pytest.raises(FileError, match=words):
                load_model(tmp_path)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    quietly(make_model(TASK), folder=tmp_path)
    others = {
        "plan had rate=0.001, this one has 0.002": (
            make_model(TASK),
            TASK,
            replace(QUICK, rate=0.002),
        ),
        "weights had dtype='torch.float32', this one has 'torch.float64'": (
            make_model(TASK).double(),
            TASK,
            QUICK,
        ),
        "config had dropout=0.0, this one has 0.5": (
            make_model(TASK, dropout=0.5),
            TASK,
            QUICK,
        ),
        "task had name='copy', this one has 'reverse'": (
            make_model(TASK),
            Reverse(4),
            QUICK,
        ),
    }
    for words, (model, task, plan) in others.items():
        with pytest.raises(OptionError) as error:
            quietly(model, task, plan, tmp_path)
        assert str(error.value) == (
            f"{tmp_path} holds another run: its {words}. Give the same, or another folder."
        )
    quietly(make_model(TASK), TASK, replace(QUICK, save_every=1), tmp_path)


def test_a_folder_without_a_run_has_no_model(tmp_path):
    with pytest.raises(FileError, match=r"no checkpoint\.safetensors in "):
        load_model(tmp_path)


# many processes


def test_two_processes_give_the_losses_of_one(tmp_path):
    places = {name: tmp_path / name for name in ("one", "two", "mixed")}
    for place in places.values():
        place.mkdir()
    runs = [
        start("group", places["two"], -1, torchrun=2),
        start("group", places["mixed"], 11, torchrun=2),  # stops after step 12
    ]
    group(places["one"], -1)
    for run in runs:
        finish(run)
    stopped = [load_json(places["mixed"] / f"rank{rank}.json") for rank in (0, 1)]
    assert all("stopped after 13 of 30 steps" in x["losses"] for x in stopped)
    assert len(read_checkpoint(places["mixed"]).losses) == 13
    group(places["mixed"], -1)  # one process goes on alone
    expected = load_json(places["one"] / "rank0.json")
    assert len(expected["losses"]) == STEPS
    assert expected["losses"][-1] < expected["losses"][0] - 0.01
    for name, rank in (("two", 0), ("two", 1), ("mixed", 0)):
        found = load_json(places[name] / f"rank{rank}.json")
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert found["weights"] == pytest.approx(expected["weights"], abs=1e-4)


def test_processes_that_found_different_checkpoints_are_refused(monkeypatch):
    group = ProcessGroup(0, 2)
    for other in (7, 0, 500):  # what the other process found; we found 7
        monkeypatch.setattr(
            ProcessGroup, "add_up", lambda _, x, y, z=other: [x + z, y + z * z]
        )
        if other == 7:
            group.check_equal(7)
            continue
        with pytest.raises(
            FileError, match="a checkpoint of step 7, others found a different"
        ):
            group.check_equal(7)


def load_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


# the curve


def test_the_curve_is_drawn_in_blocks():
    losses = [2.3 * 0.9**i for i in range(40)]
    assert curve.draw_curve(losses, width=20, height=5) == CURVE


CURVE = """\
2.18 ┤█
     │██▂
     │███▅▁
     │█████▆▃▁
   0 ┤████████▇▆▅▄▃▃▂▂▁▁▁▁
     └────────────────────
      1                 40 steps"""


def test_every_step_counts_once_in_the_curve():
    steps, means = curve.average(np.arange(1, 8), 3)
    assert steps.tolist() == [1.5, 4, 6.5]
    assert means.tolist() == [1.5, 4, 6.5]
    assert curve.average([3.0], 60)[1].tolist() == [3.0]
    with pytest.raises(ShapeError, match="expected a number for each step"):
        curve.draw_curve([])


def test_the_figure_holds_the_median_and_the_range_of_the_runs():
    runs = np.asarray([[3.0, 2.0, 1.0], [4.0, 2.5, 0.5], [5.0, 9.0, 0.7]])
    axes = curve.plot({"a": runs, "b": runs[0]}, every=10).axes[0]
    line, alone = axes.get_lines()
    assert line.get_xdata().tolist() == [10, 20, 30]
    assert line.get_ydata().tolist() == [4.0, 2.5, 0.7]
    assert alone.get_ydata().tolist() == [3.0, 2.0, 1.0]
    (shade,) = axes.collections
    heights = shade.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0.5, 9.0)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    assert axes.get_yscale() == "log"


def test_a_missing_matplotlib_is_named_with_what_to_install(monkeypatch):
    for name in [n for n in sys.modules if n.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError) as error:
        curve.plot({"a": [1.0]})
    assert str(error.value).endswith('pip install "regard[show]"')
    assert "matplotlib" in str(error.value)
