"""The dense truth of a run: every softmax that torch computes, and who computed it.

`list_softmaxes` runs a model with all of its attention in the MATH kernel, under a mode
that keeps the result of each ATen softmax with the name of the innermost running
module. It shares no code with the lens. `find_error` holds one record against one of
these matrices, with its padding in place or taken out.
"""

import math
import warnings
from contextlib import contextmanager

import torch
import transformers
from families import quiet, settle
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import regard

ATEN = torch.ops.aten
SOFTMAXES = {
    ATEN._softmax.default,
    ATEN._safe_softmax.default,
    ATEN._log_softmax.default,
}
TIGHT, EXACT = 1e-5, 1e-9  # float32, float64


class Softmaxes(TorchDispatchMode):
    """Keeps every softmax, by the innermost running module."""

    def __init__(self, stack):
        super().__init__()
        self.stack, self.found = stack, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in SOFTMAXES:
            kept = result.detach().clone()
            self.found.append((self.stack[-1] if self.stack else "", kept))
        return result


@contextmanager
def follow_modules(model):
    """Yield the names of the running modules, the innermost last."""
    stack, handles = [], []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue

        def enter(*_, name=name):
            stack.append(name)

        def leave(*_):
            stack.pop()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()


def list_softmaxes(model, run):
    """Return (name of the module, weights) of every softmax of run(model), in order."""
    with (
        quiet(),
        follow_modules(model) as stack,
        sdpa_kernel(SDPBackend.MATH),
        Softmaxes(stack) as mode,
    ):
        run(model)
    return mode.found


def group_by_module(found):
    """Return {module: its softmaxes, in order}."""
    named = {}
    for name, weights in found:
        named.setdefault(name, []).append(weights)
    return named


def watch_run(model, run, **options):
    """Return what is seen of run(model), and what it returned."""
    with quiet(), regard.watch(model, **options) as seen:
        done = run(model)
    return seen, done


# --- one record against a matrix ------------------------------------------------------


def list_choices(n, real, kept):
    """Yield the rows, or keys, of the matrix that a record with `kept` ones may hold."""
    if kept == n:
        yield torch.arange(n)
    if real is not None and int(real.sum()) == kept:
        yield real.nonzero()[:, 0]
    if kept < n:  # what no row reaches may be missing, at either end
        yield torch.arange(kept)
        yield torch.arange(n - kept, n)


def find_error(record, dense, *, real_q=None, real_k=None):
    """Return how far a record is from a matrix (H, Nq, Nk); inf if it does not fit.

    real_q, real_k: which rows and keys are no padding. Rows of padding are not
    compared. All others must be there. A key that is missing must have no weight.
    """
    heads, n_q, n_k = dense.shape
    if record.heads != heads or record.q.shape[1] == 0:
        return math.inf
    rows_real = torch.ones(n_q, dtype=torch.bool) if real_q is None else real_q.bool()
    keys_real = None if real_k is None else real_k.bool()
    mine, errors = record.weights().double(), [math.inf]
    for rows in list_choices(n_q, rows_real, mine.shape[1]):
        told = rows_real[rows]
        if int(told.sum()) != int(rows_real.sum()):
            continue
        for keys in list_choices(n_k, keys_real, mine.shape[2]):
            other = dense[:, rows].double()
            lost = other.sum(-1) - other[..., keys].sum(-1)
            gap = (mine - other[..., keys])[:, told].abs().max()
            errors.append(max(float(gap), float(lost[:, told].abs().max())))
    return min(errors)


def find_errors(seen, name, dense, **real):
    """Return the error of the records of one layer, sequence by sequence.

    dense: (B, H, Nq, Nk); real: (B, Nq) and (B, Nk)
    """
    own = {
        number: record
        for record, number in zip(seen.records, seen.recording.sequences, strict=True)
        if record.name == name
    }
    errors = []
    for b, matrix in enumerate(dense):
        told = {key: x[b] for key, x in real.items()}
        one = own.get(b)
        errors.append(math.inf if one is None else find_error(one, matrix, **told))
    return errors


def compare_all(seen, found, real=None, *, heads=4):
    """Return {layer: errors} of a run in which every softmax is attention.

    found: what list_softmaxes returned; the n-th softmax of a module is layer name#n
    real: {length of the keys: which of them are no padding (B, n)}
    heads: the number of heads, where batch and heads are one axis
    """
    errors = {}
    for name, softmaxes in group_by_module(found).items():
        for i, weights in enumerate(softmaxes):
            dense = split_heads(weights, heads)
            *_, n_q, n_k = dense.shape
            told = {
                side: (real or {})[n]
                for side, n in (("real_q", n_q), ("real_k", n_k))
                if n in (real or {})
            }
            layer = name if i == 0 else f"{name}#{i + 1}"
            errors[layer] = find_errors(seen, layer, dense, **told)
    return errors


def split_heads(weights, heads):
    """Return (B, H, Nq, Nk) of (B H, Nq, Nk)."""
    return weights if weights.ndim == 4 else weights.unflatten(0, (-1, heads))


def list_wrong(errors, limit=TIGHT):
    """Return the layers that are off by more than the limit."""
    return {name: x for name, x in errors.items() if not max(x) < limit}


# --- coverage -------------------------------------------------------------------------


def group_coverage(seen):
    """Return {module: its entries}; the layers name, name#2, … are one module's."""
    named = {}
    for entry in seen.coverage():
        named.setdefault(entry.name.split("#")[0], []).append(entry)
    return named


def count_calls(seen):
    """Return how many softmaxes and SDPA calls were heard in each module."""
    return {name: sum(x.calls for x in xs) for name, xs in group_coverage(seen).items()}


def count_softmaxes(found):
    """Return the same from the truth."""
    return {name: len(xs) for name, xs in group_by_module(found).items()}


def explain(seen, name):
    """Return every reason and note of one module."""
    entries = group_coverage(seen).get(name, ())
    told = [(x.reason, getattr(x, "note", "")) for x in entries]
    return [text for pair in told for text in pair if text]


def find_said(seen, word):
    """Return whether the report of a run says a word anywhere."""
    texts = [text for name in group_coverage(seen) for text in explain(seen, name)]
    return word in " ".join([*texts, str(seen.recording.notes), str(seen)]).lower()


# --- models ---------------------------------------------------------------------------


def build(model, inputs, *, double=False, **options):
    """Return a small model of transformers, by the name of its class."""
    cls = getattr(transformers, model)
    with quiet():
        made = cls(cls.config_class(**options)).eval()
        made = made.double() if double else made
        settle(made, inputs)
    return made.eval()


def draw(*shape, seed=0):
    """Return random tokens 5 … 89."""
    return torch.randint(5, 90, shape, generator=torch.Generator().manual_seed(seed))


def pad(n, *lengths, side):
    """Return the mask (B, n) of sequences with these lengths."""
    at = torch.arange(n)
    rows = [at < x if side == "right" else at >= n - x for x in lengths]
    return torch.stack(rows).long()


def run_plain(model, *args, **inputs):
    """Run a model without gradients and without warnings."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(*args, **inputs)
