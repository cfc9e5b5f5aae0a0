"""The training loop: AdamW, warm-up and cosine schedule, on one or more processes.

    for each step:   draw the batch of (seed, step)
                     loss = mean cross entropy of its answer tokens
                     accumulate the gradients, clip them
                     set the learning rate, update the weights, save a checkpoint if due

The data and the dropout of a step are functions of (seed, step, rank), so a run resumed
from its last checkpoint gives the same bits as an uninterrupted one.

    losses = train(CausalTransformer(config), Copy(), Plan(steps=1000), "runs/copy")

Under torchrun the same call splits every batch among the processes and gives the same
losses. Rank 0 saves and shows progress; all ranks need access to the same folder.

Next: checkpoint.py
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from regard.errors import FileError, OptionError
from regard.nn.checkpoint import resume_run, save_run
from regard.nn.decoder import CausalTransformer
from regard.nn.tasks import Task

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Training hyperparameters.

    >>> plan = Plan(steps=1001, warmup=100, rate=0.01, floor=0.1)
    >>> [round(plan.rate_at(step), 4) for step in (0, 49, 99, 550, 1000)]
    [0.0001, 0.005, 0.01, 0.0055, 0.001]
    """

    steps: int = 1000
    batch: int = 64  # sequences per step, over all micro-batches and processes
    rate: float = 1e-3  # peak learning rate
    floor: float = 0.1  # learning rate at the last step, as a fraction of the peak
    warmup: int = 100  # steps of linear warm-up
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)  # of AdamW
    clip: float = 1.0  # maximum norm of the gradient
    accumulate: int = 1  # micro-batches per batch and process, to save memory
    precision: Precision = "float32"  # of matrix products; weights keep their dtype
    seed: int = 0
    save_every: int = 500  # steps

    def __post_init__(self) -> None:
        least = dict.fromkeys(("steps", "batch", "accumulate", "save_every"), 1)
        least |= dict.fromkeys(("warmup", "seed", "floor", "weight_decay"), 0)
        for name, low in least.items():
            if not getattr(self, name) >= low:
                raise OptionError(
                    f"{name}={getattr(self, name)}, expected at least {low}."
                )
        for name, high in (("warmup", self.steps), ("floor", 1)):
            if getattr(self, name) > high:
                raise OptionError(
                    f"{name}={getattr(self, name)}, expected at most {high}."
                )
        for name in ("rate", "clip"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name}={getattr(self, name)}, expected above 0.")
        if self.precision not in get_args(Precision):
            raise OptionError(
                f"precision={self.precision!r}, expected 'float32' or 'bfloat16'."
            )

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step: linear warm-up, then cosine decay."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        way = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        wave = (1 + math.cos(math.pi * way)) / 2
        return self.rate * (self.floor + (1 - self.floor) * wave)


def train(
    model: CausalTransformer,
    task: Task,
    plan: Plan,
    folder: str | Path | None = None,
    *,
    show: bool = True,
    watch: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train a model in place and return the loss of every step.

    folder: where the run is saved, and resumed from if it holds a checkpoint
    show: show a progress bar
    watch: called after every step with its number and its loss

    Ctrl-C ends the run after the current step, saves it and raises KeyboardInterrupt.
    """
    place = None if folder is None else Path(folder)
    group = join_group(model)
    check_training(model, task, plan, group)
    optimizer = make_optimizer(model, plan)
    about = describe_run(model, task, plan)
    losses = [] if place is None else resume_run(place, model, optimizer, about)
    group.check_equal(len(losses))
    objective = group.wrap(Objective(model))
    with (
        show_progress(plan, task, losses, shown=show and group.rank == 0) as report,
        notice_stop() as is_stopped,
        torch.random.fork_rng(),  # leaves the caller's random state unchanged
    ):
        for step in range(len(losses), plan.steps):
            loss = take_step(objective, optimizer, task, plan, step=step, group=group)
            # A signal to one process stops all of them.
            loss, stops = group.add_up(loss, is_stopped())
            losses.append(loss)
            report(loss)
            due = stops or len(losses) % plan.save_every == 0 or step + 1 == plan.steps
            if group.rank == 0 and place is not None and due:
                save_run(place, model, optimizer, losses, about)
            if group.rank == 0 and watch is not None:
                watch(step, loss)
            if stops:
                raise KeyboardInterrupt(explain_stop(len(losses), plan, place))
    return losses


def take_step(
    objective: nn.Module,
    optimizer: torch.optim.AdamW,
    task: Task,
    plan: Plan,
    *,
    step: int,
    group: ProcessGroup,
) -> float:
    """Update the weights once; return the contribution of this process to the loss."""
    weights = [x for part in optimizer.param_groups for x in part["params"]]
    device = weights[0].device
    seeds = np.random.SeedSequence([plan.seed, step, group.rank])
    torch.manual_seed(int(seeds.generate_state(1)[0]))  # for dropout
    tokens, answers = (x.to(device) for x in task.batch(plan.batch, plan.seed, step))
    count = int(answers[:, 1:].sum())  # of the whole batch, which every process draws
    rows = slice(group.rank, None, group.world)
    parts = (x[rows].tensor_split(plan.accumulate) for x in (tokens, answers))
    objective.train()
    optimizer.zero_grad()
    total = 0.0
    for i, part in enumerate(zip(*parts, strict=True), 1):
        with group.hold_back(objective, i < plan.accumulate):
            with torch.autocast(
                device.type, torch.bfloat16, enabled=plan.precision == "bfloat16"
            ):
                loss = objective(*part) / count
            (loss * group.world).backward()  # DDP averages gradients; we need the sum
        total += float(loss.detach())
    norm = float(nn.utils.clip_grad_norm_(weights, plan.clip))
    if not math.isfinite(norm):
        raise OptionError(
            f"at step {step} the loss is {total} and its gradient {norm}. Try a lower "
            f"rate than {plan.rate}, or a longer warmup than {plan.warmup}."
        )
    for part in optimizer.param_groups:
        part["lr"] = plan.rate_at(step)
    optimizer.step()
    return total


class Objective(nn.Module):  # type: ignore[misc]
    """The loss as a module, because DistributedDataParallel only hooks forward.

    It is a sum, not a mean, so micro-batches of different sizes add up correctly.
    """

    def __init__(self, model: CausalTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, answers: Tensor) -> Tensor:
        """Return the summed cross entropy of the answer tokens."""
        wanted = answers[:, 1:]
        states = self.model.read(tokens)[:, :-1][wanted]  # logits only where needed
        logits = self.model.predict(states)
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(exact, tokens[:, 1:][wanted], reduction="sum")


@torch.inference_mode()  # type: ignore[untyped-decorator]
def evaluate_loss(
    model: CausalTransformer, task: Task, n: int = 1000, *, batch: int = 100
) -> float:
    """Return the mean loss of the answer tokens of n held-out sequences."""
    was_training = model.training
    objective = Objective(model).eval()
    device = model.embed.weight.device
    tokens, answers = (x.to(device) for x in task.batch(n, 0, 0, held_out=True))
    parts = zip(tokens.split(batch), answers.split(batch), strict=True)
    total = sum(float(objective(*part)) for part in parts)
    model.train(was_training)
    return total / int(answers[:, 1:].sum())


def make_optimizer(model: nn.Module, plan: Plan) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only.

    Norm gains should not be pulled to 0 (they start at 1), and biases have too few
    parameters to overfit. In an embedding, the row of a rare token would be decayed at
    every step but trained at few.
    """
    decayed: list[Tensor] = []
    free: list[Tensor] = []
    for name, weight in model.named_parameters():
        is_table = name.startswith(("embed.", "positions."))
        (decayed if weight.ndim > 1 and not is_table else free).append(weight)
    groups = [
        {"params": decayed, "weight_decay": plan.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.rate, betas=plan.betas, fused=True)


@dataclass(frozen=True)
class ProcessGroup:
    """The group of processes that split every batch."""

    rank: int = 0
    world: int = 1

    def wrap(self, objective: nn.Module) -> nn.Module:
        """Wrap the objective in DistributedDataParallel if there are more processes."""
        if self.world == 1:
            return objective
        return DistributedDataParallel(objective, forward_sync_buffers=False)

    def hold_back(self, objective: nn.Module, more: bool) -> Any:  # noqa: FBT001
        """Return a context that skips gradient sync if more micro-batches follow."""
        return objective.no_sync() if self.world > 1 and more else nullcontext()

    def add_up(self, *numbers: float) -> list[float]:
        """Return the sum of each number over all processes."""
        sums = torch.tensor(numbers, dtype=torch.float64)
        if self.world > 1:
            sums = sums.cuda() if dist.get_backend() == "nccl" else sums
            dist.all_reduce(sums)
        return sums.tolist()  # type: ignore[no-any-return]

    def check_equal(self, step: int) -> None:
        """Raise if the processes found checkpoints of different steps."""
        steps, squares = self.add_up(step, step * step)
        if steps * steps != self.world * squares:
            raise FileError(
                f"this process found a checkpoint of step {step}, others found a "
                "different one. Give all processes the same folder."
            )


def join_group(model: CausalTransformer) -> ProcessGroup:
    """Join the process group of torchrun, or return a group of one."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return ProcessGroup()
        on_gpu = model.embed.weight.is_cuda
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return ProcessGroup(dist.get_rank(), dist.get_world_size())


def check_training(
    model: CausalTransformer, task: Task, plan: Plan, group: ProcessGroup
) -> None:
    """Raise if the model is too small for the task, or the batch cannot be split."""
    config = model.config
    for name, has, needs in (
        ("vocabulary", config.vocabulary, task.vocabulary),
        ("context", config.context, task.length),
    ):
        if has < needs:
            raise OptionError(
                f"the model has {name}={has}, the task needs {needs}. "
                f"Write Config({name}={needs}, …)."
            )
    if plan.batch < group.world * plan.accumulate:
        raise OptionError(
            f"batch={plan.batch} cannot be split into accumulate={plan.accumulate} "
            f"parts for each of {group.world} processes. Make batch larger."
        )


def describe_run(model: CausalTransformer, task: Task, plan: Plan) -> dict[str, Any]:
    """Return the settings that determine the result of a run, so not save_every."""
    return {
        "config": asdict(model.config),
        "weights": {"dtype": str(model.embed.weight.dtype)},
        "plan": {k: v for k, v in asdict(plan).items() if k != "save_every"},
        "task": task.describe(),
    }


@contextmanager
def notice_stop() -> Iterator[Callable[[], bool]]:
    """Catch SIGINT and SIGTERM; yield a function that returns whether one arrived."""
    asked: list[int] = []

    def note(number: int, _frame: Any) -> None:
        if number == signal.SIGINT and number in asked:
            raise KeyboardInterrupt  # a second Ctrl-C stops immediately
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread can handle signals
        return
    before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def explain_stop(done: int, plan: Plan, folder: Path | None) -> str:
    """Return a message on where a stopped run was saved and how to resume it."""
    kept = "nothing is saved: give a folder" if folder is None else f"saved in {folder}"
    how = "" if folder is None else "; repeat the same call to resume"
    return f"stopped after {done} of {plan.steps} steps, {kept}{how}."


@contextmanager
def show_progress(
    plan: Plan, task: Task, losses: list[float], *, shown: bool
) -> Iterator[Callable[[float], None]]:
    """Show a progress bar with the loss, tokens per second and the time left."""
    columns = (
        TextColumn("{task.completed:,.0f} / {task.total:,.0f} steps"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=not shown) as progress:
        start, began = len(losses), time.monotonic()
        last = losses[-1] if losses else math.nan
        bar = progress.add_task(
            "", total=plan.steps, completed=start, loss=last, speed=0
        )

        def report(loss: float) -> None:
            tokens = (len(losses) - start) * plan.batch * task.length
            speed = tokens / (time.monotonic() - began)
            progress.update(bar, advance=1, loss=loss, speed=speed)

        yield report
