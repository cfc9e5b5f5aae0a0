"""A training run in a process of its own:  python train_worker.py <mode> <folder>

`run` trains and prints each step, `kill` lets itself be killed while it writes, `group`
trains on the ranks of torchrun, and stops halfway if told so.
"""

import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from regard.nn.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from regard.nn.decoder import CausalTransformer
from regard.nn.tasks import Copy
from regard.nn.train import Plan, train
from regard.plain.config import Config

STEPS = 30


@dataclass(frozen=True)
class Ragged(Copy):
    """Copy, but how many tokens of a sequence count differs from one to the next."""

    def batch(self, size, seed, step, *, held_out=False):
        tokens, answers = super().batch(size, seed, step, held_out=held_out)
        rng = np.random.default_rng([seed, step])
        return tokens, answers & torch.from_numpy(rng.random(answers.shape) < 0.5)


def make_model(task, **options):
    torch.manual_seed(0)
    needs = {"vocabulary": task.vocabulary, "context": task.length}
    return CausalTransformer(
        Config(**({"width": 16, "layers": 2, "heads": 2} | needs | options))
    )


def say(something):
    sys.stdout.write(f"{something}\n")
    sys.stdout.flush()


def run(folder):
    """Train slowly, with all that is random, so that there is time for a kill."""

    def watch(step, loss):
        say(step)
        time.sleep(0.03)

    plan = Plan(steps=STEPS, batch=6, accumulate=2, warmup=3, save_every=4)
    task = Copy(4)
    try:
        train(
            make_model(task, dropout=0.2), task, plan, folder, show=False, watch=watch
        )
    except KeyboardInterrupt as stop:
        say(stop)


def kill(folder):
    """Kill writers at random moments; count what is whole, and what was cut off."""
    seen, ready = {"rounds": 0, "whole": 0, "cut": 0}, folder / "ready"
    random.seed(0)
    while seen["rounds"] < 25 or (seen["cut"] < 3 and seen["rounds"] < 500):
        seen["rounds"] += 1
        child = os.fork()
        if child == 0:
            for number in range(10**6):
                weights = {str(i): torch.full((50_000,), number) for i in range(8)}
                write_checkpoint(folder, Checkpoint([0.5], weights, {}, {}, {}))
                ready.touch()
        while not ready.exists():
            time.sleep(0.001)
        time.sleep(random.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        ready.unlink()
        weights = read_checkpoint(folder).weights.values()
        seen["whole"] += len({float(x[0]) for x in weights}) == 1 and len(weights) == 8
        beside = [path for path in folder.iterdir() if path.suffix == ".new"]
        seen["cut"] += bool(beside)
        for path in beside:
            path.unlink()
    say(json.dumps(seen))


def group(folder, stop):
    """Train on all ranks; rank 0 alone asks for the stop, and all must follow."""

    def watch(step, loss):
        if step == stop:
            os.kill(os.getpid(), signal.SIGINT)

    plan = Plan(steps=STEPS, batch=11, accumulate=2, warmup=3)
    task = Ragged(4)
    model = make_model(task)
    try:
        losses = train(model, task, plan, folder, show=False, watch=watch)
    except KeyboardInterrupt as said:
        losses = str(said)
    rank = dist.get_rank() if dist.is_initialized() else 0
    weights = torch.cat([x.flatten() for x in model.parameters()]).tolist()
    out = {"losses": losses, "weights": weights}
    (folder / f"rank{rank}.json").write_text(json.dumps(out), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, place = sys.argv[1], Path(sys.argv[2])
    if mode == "group":
        group(place, int(sys.argv[3]))
    else:
        {"run": run, "kill": kill}[mode](place)
