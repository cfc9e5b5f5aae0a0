"""One training loop: AdamW, warm-up and cosine, in one process or many.

    for each step:   draw the batch of (seed, step)
                     loss = mean cross entropy of its answer tokens
                     gradients, part by part; clip them
                     set the rate, move the weights; now and then, save

All that is random in a step, its data and its dropout, is a function of (seed, step,
rank). So a run that was killed goes on from its last checkpoint to the same bits.

    losses = train(CausalTransformer(config), Copy(), Plan(steps=1000), "runs/copy")

Started by torchrun, the same call shares every batch among the processes and gives the
same losses. Rank 0 saves and shows; all must see the same folder.

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
    """How a model is trained.

    >>> plan = Plan(steps=1001, warmup=100, rate=0.01, floor=0.1)
    >>> [round(plan.rate_at(step), 4) for step in (0, 49, 99, 550, 1000)]
    [0.0001, 0.005, 0.01, 0.0055, 0.001]
    """

    steps: int = 1000
    batch: int = 64  # sequences of a step, over all parts and processes
    rate: float = 1e-3  # at its highest
    floor: float = 0.1  # of the rate, at the last step
    warmup: int = 100  # steps until the rate is reached
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)  # memory of AdamW's two means
    clip: float = 1.0  # the longest gradient
    accumulate: int = 1  # parts that a batch is cut into, to save memory
    precision: Precision = "float32"  # of matrix products; weights keep their own
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
        """Return the rate of a step: a line up, then half a wave down."""
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
    """Train a model in place; return the loss of every step.

    With a folder the run is saved there, and goes on from what it finds there. Ctrl-C
    ends it after the current step, saves, and raises KeyboardInterrupt with how to go
    on. `watch` is called after every step with its number and its loss.
    """
    place = None if folder is None else Path(folder)
    group = join_group(model)
    check_fit(model, task, plan, group)
    optimizer = make_optimizer(model, plan)
    about = describe_run(model, task, plan)
    losses = [] if place is None else resume_run(place, model, optimizer, about)
    group.check_equal(len(losses))
    objective = group.wrap(Objective(model))
    with (
        show_progress(plan, task, losses, shown=show and group.rank == 0) as report,
        notice_stop() as is_stopped,
        torch.random.fork_rng(),  # the caller's own randomness stays untouched
    ):
        for step in range(len(losses), plan.steps):
            loss = take_step(objective, optimizer, task, plan, step=step, group=group)
            loss, stops = group.add_up(loss, is_stopped())  # all stop, or none
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
    group: Group,
) -> float:
    """Move the weights once; return what this process adds to the loss."""
    weights = [x for part in optimizer.param_groups for x in part["params"]]
    device = weights[0].device
    seeds = np.random.SeedSequence([plan.seed, step, group.rank])
    torch.manual_seed(int(seeds.generate_state(1)[0]))  # for dropout
    tokens, answers = (x.to(device) for x in task.batch(plan.batch, plan.seed, step))
    count = int(answers[:, 1:].sum())  # of the whole batch: every process draws it all
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
            (loss * group.world).backward()  # processes take the mean, we the sum
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
    """The loss as a module: DistributedDataParallel sees only what is called on it.

    It is a sum, not a mean: sums over parts of a batch add up, whatever their sizes.
    """

    def __init__(self, model: CausalTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, answers: Tensor) -> Tensor:
        """Return the cross entropy of the answer tokens, added up."""
        wanted = answers[:, 1:]
        states = self.model.read(tokens)[:, :-1][wanted]  # the head needs no others
        logits = self.model.predict(states)
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(exact, tokens[:, 1:][wanted], reduction="sum")


@torch.inference_mode()  # type: ignore[untyped-decorator]
def evaluate(
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
    """Return AdamW that decays matrices only.

    Decay keeps a matrix from growing without need. The gain of a norm rests at 1, not
    at 0, and a bias is too few numbers to overfit. An embedding is a table: the row of
    a rare token would be decayed at every step, and taught at few.
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
class Group:
    """The processes that share every batch."""

    rank: int = 0
    world: int = 1

    def wrap(self, objective: nn.Module) -> nn.Module:
        """Let the gradients of all processes become one."""
        if self.world == 1:
            return objective
        return DistributedDataParallel(objective, forward_sync_buffers=False)

    def hold_back(self, objective: nn.Module, more: bool) -> Any:  # noqa: FBT001
        """Send no gradients while there are more parts to come."""
        return objective.no_sync() if self.world > 1 and more else nullcontext()

    def add_up(self, *numbers: float) -> list[float]:
        """Return the sum of each number over all processes."""
        sums = torch.tensor(numbers, dtype=torch.float64)
        if self.world > 1:
            sums = sums.cuda() if dist.get_backend() == "nccl" else sums
            dist.all_reduce(sums)
        return sums.tolist()  # type: ignore[no-any-return]

    def check_equal(self, step: int) -> None:
        """Refuse to start when not all processes found the same checkpoint."""
        steps, squares = self.add_up(step, step * step)
        if steps * steps != self.world * squares:
            raise FileError(
                f"this process found a checkpoint of step {step}, others another one. "
                "Give all of them the same folder."
            )


def join_group(model: CausalTransformer) -> Group:
    """Join the processes that torchrun has started, if it has."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return Group()
        on_gpu = model.embed.weight.is_cuda
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return Group(dist.get_rank(), dist.get_world_size())


def check_fit(model: CausalTransformer, task: Task, plan: Plan, group: Group) -> None:
    """Refuse a model that is too small for its task, and a batch for its parts."""
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
            f"batch={plan.batch} cannot be cut into accumulate={plan.accumulate} parts "
            f"for each of {group.world} processes. Make batch larger."
        )


def describe_run(model: CausalTransformer, task: Task, plan: Plan) -> dict[str, Any]:
    """Return what decides the outcome of a run; how often it is saved does not."""
    return {
        "config": asdict(model.config),
        "weights": {"dtype": str(model.embed.weight.dtype)},
        "plan": {k: v for k, v in asdict(plan).items() if k != "save_every"},
        "task": task.describe(),
    }


@contextmanager
def notice_stop() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C, and a polite kill, into a question to ask between two steps."""
    asked: list[int] = []

    def note(number: int, _frame: Any) -> None:
        if number == signal.SIGINT and number in asked:
            raise KeyboardInterrupt  # the second Ctrl-C does not wait
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread hears signals
        return
    before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def explain_stop(done: int, plan: Plan, folder: Path | None) -> str:
    """Say what is left of a run that was stopped."""
    kept = "nothing is saved: give a folder" if folder is None else f"saved in {folder}"
    how = "" if folder is None else "; the same call goes on from there"
    return f"stopped after {done} of {plan.steps} steps, {kept}{how}."


@contextmanager
def show_progress(
    plan: Plan, task: Task, losses: list[float], *, shown: bool
) -> Iterator[Callable[[float], None]]:
    """Show steps, loss, tokens a second and the time left, while the run goes on."""
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
