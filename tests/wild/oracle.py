"""What a model attends to, told by someone else: every ATen softmax of a run.

    list_softmaxes(model, run)    SDPA is forced to its MATH kernel, so that every
                                  attention is a softmax; weights and module of each
    list_heard(model, run)        an ordinary run: module and name of every softmax
                                  and SDPA operator, as often as it was executed

Nothing here is shared with src/regard. A dispatch mode stands below autograd and below
every name in Python, so a caller cannot avoid it; only FlexAttention, which compiles
itself, refuses to run under one. The module is the innermost one that
runs; it is told by nn.Module.__call__, not by hooks, because a hook on
nn.MultiheadAttention or nn.TransformerEncoderLayer turns off torch's fast path.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
MASKED = 1e4  # beyond this a logit is a mask
SOFTMAXES = {"_softmax", "_log_softmax", "_safe_softmax", "_masked_softmax"}
FUSED = re.compile(r"scaled_dot_product_\w*attention|_(flash|efficient)_attention_forw")
PACKED = {"_transformer_encoder_layer_fwd", "_native_multi_head_attention"}
PRODUCTS = {"bmm", "baddbmm"}
# what may stand between a product and a softmax, either way
STEPS = {"add", "sub", "rsub", "mul", "div", "neg", "tanh", "masked_fill", "where"}
STEPS |= {"clone", "_to_copy", "copy", "cat", "native_dropout", "constant_pad_nd"}


@dataclass
class Softmax:
    """One softmax: its weights (..., Nk), in the order of its other axes."""

    module: str
    weights: Tensor
    from_product: bool  # its logits come from a batched matrix product
    to_product: bool = False  # a batched matrix product takes its weights
    largest: float = 0.0  # of its logits, besides masks

    @property
    def attends(self) -> bool:
        """Both: nobody can say that this is no attention."""
        return self.from_product and self.to_product


class Running:
    """The stack of running modules of one model, by name."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.silent = {id(m) for m in model.modules() if isinstance(m, nn.Softmax)}
        self.stack: list[str] = []

    @property
    def name(self) -> str:
        """The innermost running module, "" for the model itself."""
        return self.stack[-1] if self.stack else ""

    @contextmanager
    def track(self) -> Iterator[None]:
        """Note every module that is called, of this model only."""
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **named: Any) -> Any:
            name = self.names.get(id(module))
            if name is None or id(module) in self.silent:
                return original(module, *args, **named)
            self.stack.append(name)
            try:
                return original(module, *args, **named)
            finally:
                self.stack.pop()

        nn.Module.__call__ = call
        try:
            yield
        finally:
            nn.Module.__call__ = original


class Listener(TorchDispatchMode):
    """Hand every operator that is executed to a function, after it was executed."""

    supports_higher_order_operators = True

    def __init__(self, note: Callable[[str, tuple, dict, Any], Any]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            with self:  # composite operators arrive whole in this mode
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        name = getattr(func, "overloadpacket", func)
        name = getattr(name, "__name__", str(name))
        self.note(name, args, kwargs, result)
        return result


def locate(x: Any) -> int | None:
    """Return where the storage of a tensor is."""
    if not isinstance(x, Tensor):
        return None
    try:
        return x.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # nested, sparse
        return None


def find_largest(logits: Tensor) -> float:
    """Return the largest logit, either sign, besides those that hide a key."""
    seen = logits[logits.abs() < MASKED]
    return float(seen.abs().max()) if seen.numel() else 0.0


class Capture:
    """Keeps the weights of every softmax, and follows logits and weights."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.found: list[Softmax] = []
        self.asked: Any = ()  # shape of the query that a layer gives to its function
        self.made: dict[int, Tensor] = {}  # by storage: what a product made
        self.taken: dict[int, tuple[Tensor, Softmax]] = {}  # what came of weights

    def note(self, name: str, args: tuple, kwargs: dict, result: Any) -> None:
        """Note one operator."""
        if name in SOFTMAXES:
            self.keep(name, args, result)
        elif FUSED.search(name):  # the model names the kernel itself
            self.unfuse(args, kwargs)
        elif name in PRODUCTS:
            for x in args:
                if locate(x) in self.taken:
                    self.taken[locate(x)][1].to_product = True
            self.made[locate(result)] = result
        elif name.rstrip("_") in STEPS:
            self.follow(args, result)

    def keep(self, name: str, args: tuple, result: Tensor) -> None:
        """Keep the weights of one softmax."""
        axis = args[1] if len(args) > 1 and isinstance(args[1], int) else -1
        weights = result.exp() if name == "_log_softmax" else result.clone()
        if weights.ndim == 0 or weights.is_nested:
            return
        rows = self.asked[:-1]  # of sequences, heads and queries
        packed = len(rows) == weights.ndim - 1 and rows[2] == 1 < weights.shape[2]
        if packed and rows.numel() == weights[..., 0].numel():  # by transformers
            weights = weights.reshape(*rows, -1)
        one = Softmax(
            module=self.running.name,
            weights=weights.movedim(axis, -1),
            from_product=locate(args[0]) in self.made,
            largest=find_largest(args[0]),
        )
        self.found.append(one)
        self.taken[locate(result)] = (result, one)

    @contextmanager
    def ask(self) -> Iterator[None]:
        """Note what layers of transformers give to their attention functions."""
        kind = getattr(sys.modules.get("transformers"), "AttentionInterface", None)
        if not hasattr(kind, "get_interface"):
            yield
            return
        original = kind.get_interface

        def get_interface(*given: Any, **named: Any) -> Any:
            function = original(*given, **named)

            def run(module: nn.Module, query: Tensor, *args: Any, **named: Any) -> Any:
                self.asked = query.shape
                try:
                    return function(module, query, *args, **named)
                finally:
                    self.asked = ()

            return run

        kind.get_interface = get_interface
        try:
            yield
        finally:
            kind.get_interface = original

    def unfuse(self, args: tuple, kwargs: dict) -> None:
        """Keep the weights of a fused kernel, as the MATH kernel tells them."""
        given = dict(zip(("q", "k", "v", "dropout", "is_causal"), args, strict=False))
        q, k, v = given["q"], given["k"], given["v"]
        _, weights = aten._scaled_dot_product_attention_math(
            q,
            k,
            v,
            kwargs.get("attn_mask"),
            is_causal=given.get("is_causal", kwargs.get("is_causal", False)),
            scale=kwargs.get("scale"),
            enable_gqa=q.shape[1] != k.shape[1],
        )
        one = Softmax(self.running.name, weights, from_product=True, to_product=True)
        self.found.append(one)

    def follow(self, args: tuple, result: Any) -> None:
        """Follow logits and weights through one step."""
        result = result[0] if isinstance(result, tuple) else result
        parts = [x for x in args if isinstance(x, Tensor)]
        parts += [y for x in args if isinstance(x, list) for y in x]
        for x in parts:
            if locate(x) in self.made:
                self.made[locate(result)] = result
            if locate(x) in self.taken:
                self.taken.setdefault(
                    locate(result), (result, self.taken[locate(x)][1])
                )


@contextmanager
def open_fast_path(*, to: bool) -> Iterator[None]:
    """Set whether torch may run a whole encoder layer as one operator."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(to)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def list_softmaxes(model: nn.Module, run: Callable[[nn.Module], Any]) -> list[Softmax]:
    """Run a model once and return every softmax, in the order of execution."""
    running = Running(model)
    capture = Capture(running)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(open_fast_path(to=False))
        stack.enter_context(running.track())
        stack.enter_context(capture.ask())
        stack.enter_context(Listener(capture.note))
        run(model)
    return capture.found


def list_heard(
    model: nn.Module, run: Callable[[nn.Module], Any]
) -> tuple[Counter[str], Any]:
    """Run a model as it is; return the softmaxes and SDPA calls by module, its output.

    A whole encoder layer that torch runs as one operator counts for its attention.
    """
    running = Running(model)
    names, heard = set(running.names.values()), Counter()

    def note(name: str, args: tuple, kwargs: dict, result: Any) -> None:
        at = running.name
        if name in PACKED:
            inner = f"{at}.self_attn".lstrip(".")
            heard[inner if inner in names else at] += 1
        elif name in SOFTMAXES or FUSED.search(name):
            heard[at] += 1

    with torch.no_grad(), running.track(), Listener(note):
        output = run(model)
    return heard, output
