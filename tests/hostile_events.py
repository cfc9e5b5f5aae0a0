"""A hundred things that may happen while a model is watched.

An event is a function of a `Stage`, which has a small model, its inputs, and `watch`:
the lens, or nothing. It is performed once with each, and both outcomes must be equal.
What an event returns is compared bit by bit; what it raises by type and message.

    python tests/hostile_events.py      the functions of regard that run in a model's run
"""

import asyncio
import contextlib
import copy
import gc
import io
import os
import pickle
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from attention_writings import Plan
from random_models import Model
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import regard

SIZES = {"heads": 2, "kv_heads": 2, "width": 4}
PLANS = (
    Plan(**SIZES, mask="causal", gate="softmax"),
    Plan(**SIZES, writing="sdpa", bias="alibi"),
    Plan(**SIZES, writing="nn.MultiheadAttention", softmax="method"),
    Plan(**SIZES, layout="bmm, batch and heads folded", softmax="in float32"),
)


@dataclass
class Stage:
    """Where an event takes place."""

    watched: bool
    model: Any = None
    seen: list[Any] = field(default_factory=list)  # of every watch that was opened

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = make_model()
        self.x, self.memory = torch.randn(2, 5, 8), torch.randn(2, 3, 8)

    @contextlib.contextmanager
    def watch(self, model: Any = None) -> Iterator[Any]:
        """Watch a model, or do nothing."""
        if not self.watched:
            yield None
            return
        with regard.watch(self.model if model is None else model) as seen:
            self.seen.append(seen)
            yield seen

    def run(self, model: Any = None, x: Tensor | None = None) -> Tensor:
        """Run a model, by default that of the stage, on the inputs of the stage."""
        model, x = self.model if model is None else model, self.x if x is None else x
        return model(x, self.memory)


def make_model(seed: int = 0, plans: tuple[Plan, ...] = PLANS) -> Model:
    """Return the same small model for the same seed."""
    torch.manual_seed(seed)
    return Model(plans, "classifier").eval()


EVENTS: dict[str, Callable[[Stage], Any]] = {}


def event(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to the events."""

    def add(perform: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in EVENTS, name
        EVENTS[name] = perform
        return perform

    return add


def each(name: str, *values: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function to the events once for each value, its second argument."""

    def add(perform: Callable[..., Any]) -> Callable[..., Any]:
        for value in values:
            told = getattr(value, "__name__", value)
            event(f"{name}: {told}")(lambda s, v=value: perform(s, v))
        return perform

    return add


# --- exceptions -----------------------------------------------------------------------


class Stop(BaseException):
    """An exception that is no Exception."""


class OperatorBomb(TorchDispatchMode):
    """Raise an error at the k-th operator."""

    def __init__(self, k: int, error: BaseException) -> None:
        super().__init__()
        self.left, self.error = k, error

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return func(*args, **(kwargs or {}))


class FunctionBomb(TorchFunctionMode):
    """Raise an error at the k-th torch function."""

    def __init__(self, k: int, error: BaseException) -> None:
        super().__init__()
        self.left, self.error = k, error

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return func(*args, **(kwargs or {}))


@each("error at operator", 0, 3, 9, 14, 20, 27, 40, 55, 62, 70, 85)
def fail_at_operator(s: Stage, k: int):
    with s.watch(), torch.no_grad(), OperatorBomb(k, RuntimeError(f"operator {k}")):
        return s.run()


@each("error at function", 0, 5, 13, 21, 33, 48, 60)
def fail_at_function(s: Stage, k: int):
    with s.watch(), torch.no_grad(), FunctionBomb(k, ValueError(f"function {k}")):
        return s.run()


ERRORS = (
    KeyboardInterrupt,
    SystemExit,
    GeneratorExit,
    MemoryError,
    StopIteration,
    NotImplementedError,
    AttributeError,
    torch.OutOfMemoryError,
    RecursionError,
    Stop,
)


@each("in a module", *ERRORS)
def fail_in_module(s: Stage, kind: type[BaseException]):
    def fail(module, args):
        raise kind("in the second block")

    s.model.blocks[1].to_q.register_forward_pre_hook(fail)
    with s.watch():
        return s.run()


@each("in the block, after a run", KeyboardInterrupt, RuntimeError, Stop)
def fail_in_block(s: Stage, kind: type[BaseException]):
    with s.watch():
        s.run()
        raise kind("in the with")


@event("an error is caught, and the model runs again")
def fail_and_go_on(s: Stage):
    with s.watch(), torch.no_grad():
        with contextlib.suppress(RuntimeError), OperatorBomb(30, RuntimeError("once")):
            s.run()
        return s.run()


@event("a signal interrupts a module")
def interrupt(s: Stage):
    def press(module, args):
        signal.raise_signal(signal.SIGINT)

    s.model.blocks[2].register_forward_pre_hook(press)
    with s.watch():
        return s.run()


@event("a shape that does not fit")
def fail_by_shape(s: Stage):
    with s.watch():
        return s.run(x=torch.randn(2, 5, 7))


@event("a dtype that does not fit")
def fail_by_dtype(s: Stage):
    with s.watch():
        return s.run(x=s.x.double())


class Wrong(nn.Module):
    """Call torch as it must not be called."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


def call_sdpa(x: Tensor, *more: Any, **named: Any) -> Tensor:
    """Call SDPA with x as q, k and v."""
    return F.scaled_dot_product_attention(x, x, x, *more, **named)


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "a mask of another shape": lambda x: call_sdpa(x, torch.ones(4, 4).bool()),
    "a mask that is a list": lambda x: call_sdpa(x, [1, 2]),
    "keys of another width": lambda x: F.scaled_dot_product_attention(x, x[..., 1:], x),
    "causal and a mask": lambda x: call_sdpa(x, torch.zeros(5, 5), is_causal=True),
    "no values": lambda x: F.scaled_dot_product_attention(x, x),
    "an unknown option": lambda x: call_sdpa(x, scales=2),
    "an axis that is not there": lambda x: F.softmax(x, dim=7),
    "a softmax of text": lambda x: F.softmax("x", dim=1),
    "a softmax of integers": lambda x: torch.softmax(x.long(), 1),
    "a softmax of nothing": lambda x: F.softmax(dim=1),
    "a product that does not fit": lambda x: x.softmax(-1) @ x,
}


@each("torch refuses", *REFUSED)
def refuse(s: Stage, what: str):
    model = Wrong(REFUSED[what])
    with s.watch(model):
        return model(s.x)


@event("warnings are errors")
def forbid_warnings(s: Stage):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with s.watch():
            return s.run()


@event("a warning is an error, in the model")
def warn(s: Stage):
    s.model.blocks[1].register_forward_hook(
        lambda *_: warnings.warn("careful", stacklevel=1)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with s.watch():
            return s.run()


@event("the stack is almost used up")
def recurse_deeply(s: Stage):
    def dive(n):
        return s.run() if n == 0 else dive(n - 1)

    with s.watch():
        return dive(sys.getrecursionlimit() - 500)


@event("the stack is used up")
def recurse_forever(s: Stage):
    s.model.blocks[0].register_forward_hook(lambda *_: s.run() and None)
    with s.watch():
        try:
            s.run()
        except RecursionError:  # where it strikes is not ours to say
            return "too deep"


@event("a module calls itself")
def recurse(s: Stage):
    depth = [0]

    def again(module, args, out):
        if depth[0] < 2:
            depth[0] += 1
            return out + module(*args)
        return None

    s.model.blocks[1].register_forward_hook(again)
    with s.watch():
        return s.run()


# --- threads, tasks, generators, processes --------------------------------------------


def run_threads(*works: Callable[[], Any]) -> list[Any]:
    """Return what each function returns, run at once."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [x.result(60) for x in [pool.submit(work) for work in works]]


@event("threads run the model")
def run_in_threads(s: Stage):
    inputs = [torch.randn(2, n, 8) for n in (4, 5, 6)]
    with s.watch():
        return run_threads(*(partial(s.run, x=x) for x in inputs))


@event("threads run another model")
def run_another_in_threads(s: Stage):
    other = make_model(1)
    with s.watch():
        return run_threads(*(partial(s.run, other) for _ in range(3)), s.run)


@event("a thread outlives the watch")
def outlive(s: Stage):
    gate, results = threading.Event(), []

    def work():
        results.append(s.run())
        gate.wait(60)
        results.append(s.run())

    thread = threading.Thread(target=work)
    with s.watch():
        thread.start()
        results.append(s.run())
    gate.set()
    thread.join(60)
    return results


@event("a watch in a thread, the model in another")
def watch_in_thread(s: Stage):
    turn = threading.Barrier(2)

    def look():
        with s.watch():
            turn.wait(60)
            out = s.run()
            turn.wait(60)
        return out

    def work():
        turn.wait(60)
        out = s.run()
        turn.wait(60)
        return out

    return run_threads(look, work)


@event("watches in threads end in another order")
def cross_threads(s: Stage):
    turn, other = threading.Barrier(2), make_model(1)

    def first():
        with s.watch():
            turn.wait(60)
            out = s.run()
        turn.wait(60)
        return out

    def second():
        with s.watch(other):
            turn.wait(60)
            turn.wait(60)
            return s.run(other)

    return run_threads(first, second)


@event("a thread fails")
def fail_in_thread(s: Stage):
    with s.watch():
        return run_threads(s.run, lambda: s.run(x=torch.randn(2, 5, 7)))


@event("tasks with a watch each")
def interleave_tasks(s: Stage):
    other = make_model(1)

    async def work(model, pauses):
        with s.watch(model):
            out = [s.run(model)]
            for _ in range(pauses):
                await asyncio.sleep(0)
            out.append(s.run(model))
            await asyncio.sleep(0)
        return out

    async def both():
        return await asyncio.gather(work(s.model, 1), work(other, 4))

    return asyncio.run(both())


@event("a task is cancelled")
def cancel_task(s: Stage):
    async def work():
        with s.watch():
            s.run()
            await asyncio.sleep(60)

    async def start():
        task = asyncio.create_task(work())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return s.run()

    return asyncio.run(start())


def watch_in_generator(s: Stage) -> Iterator[Tensor]:
    with s.watch():
        yield s.run()
        yield s.run()


@event("a generator is abandoned")
def abandon(s: Stage):
    first = next(watch_in_generator(s))
    gc.collect()
    return first, s.run()


@event("a generator is closed")
def close(s: Stage):
    running = watch_in_generator(s)
    first = next(running)
    out = s.run()
    running.close()
    return first, out, s.run()


@event("an error is thrown into a generator")
def throw(s: Stage):
    running = watch_in_generator(s)
    next(running)
    return running.throw(RuntimeError("thrown"))


@event("two generators take turns")
def take_turns(s: Stage):
    one, two = watch_in_generator(s), watch_in_generator(s)
    out = [next(one), next(two), next(one), next(two)]
    return out, list(one), list(two)


@event("a generator runs inside of the watch")
def run_generator(s: Stage):
    def work():
        for _ in range(3):
            yield s.run()

    steps = work()
    with s.watch():
        first = next(steps)
    return first, *steps


@event("a process is forked")
def fork(s: Stage):
    read, write = os.pipe()
    with s.watch():
        before = s.run()
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)  # OpenMP's own threads do not survive a fork
            with os.fdopen(write, "wb") as file:
                try:
                    file.write(pickle.dumps(s.run().tolist()))
                except BaseException as error:  # noqa: BLE001
                    file.write(pickle.dumps(repr(error)))
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as file:
            theirs = pickle.loads(file.read())
        os.waitpid(child, 0)
        return before, theirs, s.run()


# --- the model changes ----------------------------------------------------------------


@event("the model is deleted")
def delete(s: Stage):
    x, memory = s.x, s.memory
    with s.watch():
        model, s.model = s.model, None
        out = model(x, memory)
        del model
        gc.collect()
    return out


@event("the model is not kept alive")
def forget(s: Stage):
    alive = weakref.ref(s.model)
    with s.watch():
        out = s.run()
    s.model = None
    gc.collect()
    return out, alive() is None


@event("blocks are deleted between runs")
def delete_block(s: Stage):
    with s.watch():
        first = s.run()
        del s.model.blocks[1]
        gc.collect()
        return first, s.run()


@event("a block is deleted while it runs")
def delete_running(s: Stage):
    def delete(module, args):
        s.model.blocks[2].child.out_proj.bias = None

    s.model.blocks[2].child.register_forward_pre_hook(delete)
    with s.watch():
        return s.run()


@event("a block is replaced while another runs")
def replace_running(s: Stage):
    def change(module, args):
        s.model.blocks[3] = make_model(1).blocks[0]

    s.model.blocks[1].register_forward_pre_hook(change)
    with s.watch():
        return s.run(), s.run()


@event("blocks are added and moved")
def move_blocks(s: Stage):
    with s.watch():
        out = [s.run()]
        s.model.blocks.append(make_model(2).blocks[1])
        out.append(s.run())
        s.model.blocks = nn.ModuleList(reversed(s.model.blocks))
        out.append(s.run())
    return out, s.run()


@event("the same block twice")
def share_block(s: Stage):
    s.model.blocks.insert(1, s.model.blocks[0])
    with s.watch():
        return s.run()


@event("weights are changed in place")
def change_weights(s: Stage):
    with s.watch(), torch.no_grad():
        first = s.run()
        for weight in s.model.parameters():
            weight.mul_(1.5)
        return first, s.run()


@event("a state is loaded")
def load_state(s: Stage):
    with s.watch():
        first = s.run()
        s.model.load_state_dict(make_model(3).state_dict())
        return first, s.run()


@each("the dtype changes", torch.float64, torch.bfloat16)
def change_dtype(s: Stage, dtype: torch.dtype):
    with s.watch():
        first = s.run()
        s.model.to(dtype)
        s.memory = s.memory.to(dtype)
        return first, s.run(x=s.x.to(dtype))


@event("the model begins to train")
def change_training(s: Stage):
    s.model.blocks[2].child.dropout = 0.5
    with s.watch():
        first = s.run()
        s.model.train()
        return first, s.run(), s.run()


@event("forward is replaced on an object")
def replace_forward(s: Stage):
    block = s.model.blocks[1]
    with s.watch():
        first = s.run()
        block.forward = lambda x, memory, valid: x * 2
        second = s.run()
    return first, second, s.run(), "forward" in vars(block)


@event("forward is replaced on its class")
def replace_class_forward(s: Stage):
    kind = type(s.model.classify)
    before = kind.forward
    with s.watch():
        first = s.run()
        kind.forward = lambda self, x: before(self, x) + 1
        try:
            second = s.run()
        finally:
            kind.forward = before
    return first, second, s.run()


@event("softmax is replaced while it is watched")
def replace_softmax(s: Stage):
    before = F.softmax
    with s.watch():
        first = s.run()
        F.softmax = lambda *args, **named: before(*args, **named) * 2
        try:
            second = s.run()
        finally:
            F.softmax = before
    return first, second, s.run(), F.softmax is before


@event("the class is changed")
def change_class(s: Stage):
    class Louder(type(s.model.blocks[0])):
        def forward(self, *args):
            return super().forward(*args) * 3

    with s.watch():
        first = s.run()
        s.model.blocks[0].__class__ = Louder
        return first, s.run()


@event("hooks come and go in a forward")
def change_hooks(s: Stage):
    handles = []

    def add(module, args):
        handles.append(
            s.model.blocks[1].register_forward_hook(lambda m, a, out: out + 1)
        )

    def remove(module, args):
        for handle in handles:
            handle.remove()

    s.model.blocks[0].register_forward_pre_hook(add)
    s.model.blocks[3].register_forward_pre_hook(remove)
    with s.watch():
        return s.run(), s.run()


@event("all hooks are cleared in the watch")
def clear_hooks(s: Stage):
    s.model.blocks[0].register_forward_hook(lambda m, a, out: out + 1)
    with s.watch():
        first = s.run()
        for module in s.model.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
        return first, s.run()


@event("hooks that are always called")
def call_always(s: Stage):
    calls = []
    for i, block in enumerate(s.model.blocks):
        block.register_forward_hook(lambda *_, i=i: calls.append(i), always_call=True)
    with s.watch():
        s.run()
        with contextlib.suppress(RuntimeError):
            s.run(x=torch.randn(2, 5, 7))
    return calls


@event("hooks of all modules")
def hook_all(s: Stage):
    calls = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, a, out: calls.append(type(m).__name__)
    )
    try:
        with s.watch():
            return s.run(), calls
    finally:
        handle.remove()


@event("the output is changed in place")
def change_output(s: Stage):
    s.model.blocks[1].register_forward_hook(lambda m, a, out: out.mul_(2))
    with s.watch(), torch.no_grad():
        return s.run().add_(1), s.run()


@event("the model is copied")
def copy_model(s: Stage):
    with s.watch():
        first, other = s.run(), copy.deepcopy(s.model)
        return first, s.run(other), len(list(other.modules()))


@event("the model is pickled")
def pickle_model(s: Stage):
    with s.watch():
        other = pickle.loads(pickle.dumps(s.model))
        out = s.run(), s.run(other)
    return out, s.run(other), sorted(vars(other)), sorted(vars(other.blocks[0]))


@event("the model is saved")
def save_model(s: Stage):
    file = io.BytesIO()
    with s.watch():
        s.run()
        torch.save(s.model, file)
    file.seek(0)
    return s.run(torch.load(file, weights_only=False))


# --- watches in watches ---------------------------------------------------------------


@event("two watches of one model")
def watch_twice(s: Stage):
    with s.watch(), s.watch():
        return s.run()


@event("a watch of a part in a watch")
def watch_part(s: Stage):
    with s.watch(), s.watch(s.model.blocks[1]):
        return s.run()


@event("watches of two models")
def watch_two(s: Stage):
    other = make_model(1)
    with s.watch(), s.watch(other):
        return s.run(), s.run(other), s.run()


@event("watches end in another order")
def end_crossed(s: Stage):
    one, two = s.watch(), s.watch()
    one.__enter__()
    two.__enter__()
    out = [s.run()]
    one.__exit__(None, None, None)
    out.append(s.run())
    two.__exit__(None, None, None)
    return out, s.run()


@event("a watch begins in a forward")
def begin_inside(s: Stage):
    stack = contextlib.ExitStack()
    s.model.blocks[1].register_forward_pre_hook(
        lambda *_: stack.enter_context(s.watch()) and None
    )
    with stack:
        return s.run()


@event("a watch ends in a forward")
def end_inside(s: Stage):
    stack = contextlib.ExitStack()
    s.model.blocks[1].register_forward_hook(lambda *_: stack.close())
    with stack:
        stack.enter_context(s.watch())
        out = s.run()
        return out, s.run()


@event("many watches, one after another")
def watch_often(s: Stage):
    out = []
    for _ in range(20):
        with s.watch():
            out.append(s.run())
    return out


@event("an error in the inner of two watches")
def fail_in_inner(s: Stage):
    with s.watch():
        s.run()
        with contextlib.suppress(ZeroDivisionError), s.watch():
            s.run()
            raise ZeroDivisionError
        return s.run()


# --- torch's own machinery ------------------------------------------------------------


@event("compiled in the watch")
def compile_inside(s: Stage):
    torch._dynamo.reset()
    with s.watch(), torch.no_grad():
        return s.run(torch.compile(s.model, backend="eager"))


@event("compiled before the watch")
def compile_before(s: Stage):
    torch._dynamo.reset()
    compiled = torch.compile(s.model, backend="eager")
    with torch.no_grad():
        first = s.run(compiled)
        with s.watch(compiled):
            return first, s.run(compiled)


@event("a compiled block")
def compile_block(s: Stage):
    torch._dynamo.reset()
    s.model.blocks[0].compile(backend="eager")
    with s.watch(), torch.no_grad():
        return s.run()


@event("compiled after the watch")
def compile_after(s: Stage):
    torch._dynamo.reset()
    with s.watch(), torch.no_grad():
        first = s.run()
    with torch.no_grad():
        return first, s.run(torch.compile(s.model, backend="eager", fullgraph=False))


@event("exported in the watch")
def export(s: Stage):
    with s.watch(), torch.no_grad():
        program = torch.export.export(s.model, (s.x, s.memory), strict=False)
        names = [str(node.target) for node in program.graph.nodes]
        return program.module()(s.x, s.memory), names


@event("an exported program is watched")
def watch_exported(s: Stage):
    program = torch.export.export(s.model, (s.x, s.memory), strict=False).module()
    with s.watch(program), torch.no_grad():
        return s.run(program)


@event("traced in the watch")
def trace(s: Stage):
    with s.watch(), torch.no_grad():
        traced = torch.jit.trace(s.model.blocks[0], (s.x, s.memory))
        kinds = [node.kind() for node in traced.inlined_graph.nodes()]
        return s.run(traced), kinds


@event("a traced model is watched")
def watch_traced(s: Stage):
    with torch.no_grad():
        traced = torch.jit.trace(s.model.blocks[0], (s.x, s.memory))
        with s.watch(traced):
            return s.run(traced)


class Scripted(nn.Module):
    """Attention that torch.jit.script can read."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.transpose(-1, -2), dim=-1) @ x


@event("a scripted block")
def script(s: Stage):
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(Scripted()), Scripted())
    with s.watch(model), torch.no_grad():
        return model(s.x)


@event("scripted in the watch")
def script_inside(s: Stage):
    with s.watch():
        return torch.jit.script(Scripted())(s.x), s.run()


@event("traced symbolically")
def trace_symbolically(s: Stage):
    with s.watch():
        traced = torch.fx.symbolic_trace(Scripted())
        return traced(s.x), str(traced.graph), s.run()


class Flexible(nn.Module):
    """Attention with a function of the scores."""

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        return flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s + i - j)


@event("flexible attention")
def use_flex(s: Stage):
    model = Flexible()
    with s.watch(model), torch.no_grad():
        return model(s.x)


@event("mapped over a batch")
def map_batch(s: Stage):
    batch = torch.randn(3, 2, 5, 8)
    block = s.model.blocks[0]
    with s.watch(), torch.no_grad():
        return vmap(lambda x: block(x, s.memory))(batch)


@event("per-sample gradients")
def take_sample_gradients(s: Stage):
    block = s.model.blocks[0]
    weights = {k: v.detach() for k, v in block.named_parameters()}

    def loss(weights, x):
        return functional_call(block, weights, (x[None], s.memory)).square().sum()

    with s.watch():
        return vmap(grad(loss), in_dims=(None, 0))(weights, s.x)


@each("differentiated", grad, jacrev, hessian)
def differentiate(s: Stage, how: Callable[..., Any]):
    model = Scripted()
    with s.watch(model):
        return how(lambda x: model(x).square().sum())(s.x[:1, :2, :3])


@event("forward differentiation")
def push_forward(s: Stage):
    model = Scripted()
    with s.watch(model):
        return jvp(model, (s.x,), (s.x,))


@event("a functional call")
def call_functional(s: Stage):
    weights = {k: v.detach() * 2 for k, v in s.model.named_parameters()}
    with s.watch():
        return functional_call(s.model, weights, (s.x, s.memory)), s.run()


@event("on the meta device")
def run_meta(s: Stage):
    model = copy.deepcopy(s.model).to("meta")
    del model.blocks[:2]  # they make masks of their own, on the CPU
    with s.watch(model), torch.device("meta"):
        out = model(s.x.to("meta"), s.memory.to("meta"))
    return tuple(out.shape), str(out.device), s.run()


@event("with fake tensors")
def run_fake(s: Stage):
    from torch._subclasses import FakeTensorMode  # noqa: PLC0415

    with s.watch(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = s.run(x=mode.from_tensor(s.x))
    return tuple(out.shape), type(out).__name__, s.run()


@event("fake, then real")
def run_fake_and_real(s: Stage):
    from torch._subclasses import FakeTensorMode  # noqa: PLC0415

    with s.watch(), torch.no_grad():
        first = s.run()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            s.run(x=mode.from_tensor(s.x))
        return first, s.run()


# --- modes ----------------------------------------------------------------------------


class Seen(TorchFunctionMode):
    """Count the functions that the model calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", "?"))
        return func(*args, **(kwargs or {}))


class Doubled(TorchDispatchMode):
    """Double every softmax: a mode that changes the model."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if "softmax" in str(func) else out


@event("a function mode inside")
def use_function_mode(s: Stage):
    with s.watch(), Seen() as mode:
        return s.run(), mode.names


@event("a function mode outside")
def use_function_mode_outside(s: Stage):
    with Seen() as mode, s.watch():
        out = s.run()
    return out, len(mode.names) > 0


@event("a dispatch mode inside")
def use_dispatch_mode(s: Stage):
    with s.watch(), torch.no_grad(), Doubled():
        return s.run()


@event("a dispatch mode outside")
def use_dispatch_mode_outside(s: Stage):
    with torch.no_grad(), Doubled(), s.watch():
        return s.run()


@event("flops are counted")
def count_flops(s: Stage):
    with s.watch(), FlopCounterMode(display=False) as mode:
        out = s.run()
    return out, mode.get_total_flops()


@event("a default device")
def use_device(s: Stage):
    with torch.device("cpu"), s.watch():
        return s.run()


@event("inference mode inside")
def infer_inside(s: Stage):
    with s.watch(), torch.inference_mode():
        out = s.run()
        return out, out.is_inference()


@event("inference mode outside")
def infer_outside(s: Stage):
    with torch.inference_mode(), s.watch():
        out = s.run()
    return out, out.is_inference()


@event("autocast inside")
def autocast_inside(s: Stage):
    with s.watch(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return s.run()


@event("autocast outside")
def autocast_outside(s: Stage):
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), s.watch():
        return s.run(), torch.is_autocast_enabled("cpu")


@event("one kernel only")
def choose_kernel(s: Stage):
    with s.watch(), sdpa_kernel(SDPBackend.MATH):
        return s.run()


@event("deterministic algorithms")
def be_deterministic(s: Stage):
    torch.use_deterministic_algorithms(mode=True)
    try:
        with s.watch():
            return s.run()
    finally:
        torch.use_deterministic_algorithms(mode=False)


@event("another default dtype")
def change_default(s: Stage):
    torch.set_default_dtype(torch.float64)
    try:
        with s.watch():
            return s.run()
    finally:
        torch.set_default_dtype(torch.float32)


@event("a profiler")
def profile(s: Stage):
    with s.watch(), torch.profiler.profile() as found:
        out = s.run()
    return out, len(found.events()) > 0


@event("a tracing function")
def trace_python(s: Stage):
    lines = []
    with s.watch():
        sys.settrace(lambda *_: lines.append(1))
        try:
            out = s.run()
        finally:
            sys.settrace(None)
    return out, len(lines) > 0


class Marked(Tensor):
    """A tensor that stays marked."""


@event("a subclass of tensors")
def use_subclass(s: Stage):
    with s.watch():
        out = s.run(x=s.x.as_subclass(Marked))
    return out.as_subclass(Tensor), type(out).__name__


# --- gradients ------------------------------------------------------------------------


def read_gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


@event("backward in the watch")
def go_back(s: Stage):
    with s.watch():
        s.run().square().sum().backward()
    return read_gradients(s.model)


@event("backward after the watch")
def go_back_after(s: Stage):
    with s.watch():
        out = s.run()
    out.square().sum().backward()
    return read_gradients(s.model)


@event("backward of a run before the watch")
def go_back_before(s: Stage):
    out = s.run()
    with s.watch():
        out.square().sum().backward()
        s.run()
    return read_gradients(s.model)


@event("the model runs in a backward hook")
def run_in_backward(s: Stage):
    found = []
    with s.watch():
        out = s.run()
        out.register_hook(lambda g: found.append(s.run().detach()))
        out.square().sum().backward()
    return found, read_gradients(s.model)


@event("second derivatives")
def go_back_twice(s: Stage):
    x, model = s.x.clone().requires_grad_(), Scripted()
    with s.watch(model):
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
    return x.grad


@each("checkpoint, reentrant", True, False)
def use_checkpoint(s: Stage, reentrant: bool):
    x = s.x.clone().requires_grad_()
    s.model.train()
    s.model.blocks[2].child.dropout = 0.5
    with s.watch():
        out = checkpoint(s.model, x, s.memory, use_reentrant=reentrant)
        out.square().sum().backward()
    return out.detach(), x.grad, read_gradients(s.model)


@event("an error in backward")
def fail_in_backward(s: Stage):
    def fail(grad):
        raise RuntimeError("in backward")

    with s.watch():
        out = s.run()
        out.register_hook(fail)
        out.sum().backward()


@event("saved tensors are packed")
def pack(s: Stage):
    sizes = []

    def keep(x):
        sizes.append(tuple(x.shape))
        return x

    with s.watch(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        s.run().sum().backward()
    return sizes, read_gradients(s.model)


@event("anomalies are detected")
def detect(s: Stage):
    with s.watch(), torch.autograd.detect_anomaly(check_nan=True):
        s.run(x=s.x * torch.nan).sum().backward()


@event("full backward hooks")
def hook_backward(s: Stage):
    sums = []
    s.model.blocks[1].register_full_backward_hook(
        lambda m, before, after: sums.append(float(after[0].sum()))
    )
    with s.watch():
        s.run().square().sum().backward()
    return sums


@event("a training step")
def train(s: Stage):
    s.model.train()
    s.model.blocks[2].child.dropout = 0.3
    steps = torch.optim.Adam(s.model.parameters(), 0.1)
    out = []
    with s.watch():
        for _ in range(3):
            steps.zero_grad()
            loss = s.run().square().sum()
            loss.backward()
            steps.step()
            out.append(loss.detach())
    return out, [p.detach() for p in s.model.parameters()]


# --- odd inputs -----------------------------------------------------------------------


@each("inputs", torch.nan, torch.inf, 1e30, 0.0)
def give_odd(s: Stage, value: float):
    with s.watch():
        return s.run(x=torch.full((2, 5, 8), value))


@each("empty inputs", (0, 5, 8), (2, 0, 8))
def give_nothing(s: Stage, shape: tuple[int, ...]):
    del s.model.blocks[2]
    s.memory = s.memory[: shape[0]]
    with s.watch():
        return s.run(x=torch.zeros(shape))


@event("nothing runs")
def do_nothing(s: Stage):
    with s.watch():
        return "nothing"


@event("the random numbers are those of the model")
def draw_numbers(s: Stage):
    s.model.train()
    s.model.blocks[2].child.dropout = 0.5
    with s.watch():
        return s.run(), torch.randn(3), s.run(), torch.randn(3)


# --- our own functions ----------------------------------------------------------------


def list_internals() -> list[str]:
    """Return "module:name" of the functions of regard that run while a model runs."""
    found, stage = set(), Stage(watched=True)

    def look(frame, what, _):
        place = frame.f_globals.get("__name__", "")
        if what == "call" and place.startswith("regard.") and frame.f_back is not None:
            name = frame.f_code.co_qualname
            if "<" not in name:  # what is made in a function cannot be replaced
                found.add(f"{place}:{name}")

    with stage.watch():
        sys.setprofile(look)
        try:
            stage.run()
            stage.run().sum().backward()
        finally:
            sys.setprofile(None)
    return sorted(found)


if __name__ == "__main__":
    sys.stdout.write("\n".join([*list_internals(), ""]))
