"""Whatever happens during a watch, the model does what it does without one.

Every event of hostile_events.py is performed twice, unwatched and watched. Equal must be:
what it returns, bit by bit, or raises; the state of the random numbers; the hooks and
attributes of the modules; and everything that can be patched in torch.
"""

import functools
import hashlib
import importlib
import itertools
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hostile_events import EVENTS, Stage, list_internals
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules import module as modules

import regard
from regard.lens.watch import __file__ as watch_file
from regard.run.modules import __file__ as modules_file

OWNERS = (
    torch,
    F,
    torch.overrides,
    torch.special,
    torch.utils.checkpoint,
    torch.autograd,
    modules,
    torch.Tensor,
    nn.Module,
    nn.Linear,
    nn.Softmax,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerEncoder,
    torch.autograd.Function,
)
MAPPINGS = ("modeling_utils", "integrations.sdpa_attention")


@dataclass(frozen=True)
class Outcome:
    """All that an event may not do otherwise when it is watched."""

    result: object
    rng: bytes
    left: tuple[str, ...]
    unusable: str  # why what was recorded cannot be read


def freeze(x):
    """Return something that is equal if all bits are."""
    if isinstance(x, Tensor):
        bits = bytes(x.detach().contiguous().flatten().view(torch.uint8))
        about = f"{tuple(x.shape)} {x.dtype} {x.requires_grad}"
        return f"tensor {about} {hashlib.sha256(bits).hexdigest()[:12]}"
    if isinstance(x, dict):
        return {k: freeze(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [freeze(v) for v in x]
    return x


def look_at_torch():
    """Return everything that may be patched, by name."""
    found = {
        f"{owner.__name__}.{name}": value
        for owner in OWNERS
        for name, value in vars(owner).items()
        if callable(value) or isinstance(value, (staticmethod, classmethod, dict))
    }
    for name in MAPPINGS:
        library = sys.modules.get(f"transformers.{name}")
        found |= {f"{name}.{k}": v for k, v in vars(library).items()} if library else {}
    return found


def look_at_state():
    """Return the settings of torch and of Python that a lens may touch."""
    return {
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "filters": len(warnings.filters),
        "trace": (sys.gettrace(), sys.getprofile()),
        "threads": torch.get_num_threads(),
        "global hooks": len(modules._global_forward_hooks)
        + len(modules._global_forward_pre_hooks),
    }


def look_at_model(model):
    """Return the hooks, attributes and class of every module."""
    if not isinstance(model, nn.Module):
        return {}
    return {
        name: (
            type(m).__qualname__,
            sorted(vars(m)),
            [(k, len(v)) for k, v in vars(m).items() if "hooks" in k and v is not None],
        )
        for name, m in model.named_modules()
    }


def perform(event, *, watched):
    """Perform an event, and return its outcome."""
    torch.manual_seed(1)
    stage, before, state = Stage(watched), look_at_torch(), look_at_state()
    try:
        result = freeze(event(stage))
    except BaseException as error:  # noqa: BLE001 (also what ends a program)
        result = (type(error).__name__, str(error))
    after = look_at_torch()
    left = [  # what is imported late is new, not patched
        f"{name} is patched"
        for name in before.keys() & after.keys()
        if before[name] is not after[name]
    ]
    left += [f"{k}: {v}" for k, v in look_at_state().items() if state[k] != v]
    left += [f"{k}: {v}" for k, v in look_at_model(stage.model).items()]
    rng = bytes(torch.get_rng_state())
    return Outcome(result, rng, tuple(sorted(left)), try_to_read(stage.seen))


def try_to_read(found):
    """Return why something that was recorded cannot be read."""
    for seen in found:
        try:
            str(seen)
            for record in seen.records:
                record.weights()
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
    return ""


@functools.cache
def warm_up():
    """Let torch and the lens do what they do but once, such as imports."""
    perform(EVENTS["a training step"], watched=True)


@functools.cache
def perform_both(name):
    """Return the outcomes of an event, unwatched and watched."""
    warm_up()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(perform(EVENTS[name], watched=x) for x in (False, True))


def tell_difference(name, plain, watched):
    """Return in which ways two outcomes differ."""
    told = [
        f"{name}: {a} unwatched, {b} watched"
        for a, b in zip_all(listed(plain.result), listed(watched.result))
        if a != b
    ]
    if plain.rng != watched.rng:
        told.append(f"{name}: the random numbers are others")
    more = sorted(set(watched.left) - set(plain.left))
    return told + [f"{name}: left behind: {x}" for x in more]


def zip_all(a, b):
    return itertools.zip_longest(a, b, fillvalue="nothing")


def listed(x):
    """Return the parts of a result, in order."""
    if isinstance(x, (list, tuple)):
        return [part for y in x for part in listed(y)]
    if isinstance(x, dict):
        return [part for y in x.values() for part in listed(y)]
    return [f"{type(x).__name__} {x!r}"]


def test_there_are_a_hundred():
    assert len(EVENTS) >= 100


@pytest.mark.parametrize("name", EVENTS)
def test_the_model_does_the_same(name):
    assert tell_difference(name, *perform_both(name)) == []


UNENDED = {"a generator is abandoned"}  # its `with` was never left


@pytest.mark.parametrize("name", [x for x in EVENTS if x not in UNENDED])
def test_what_was_recorded_can_be_read(name):
    assert perform_both(name)[1].unusable == ""


# --- our own errors -------------------------------------------------------------------

INTERNALS = (  # "module:name", called while a watched model runs
    "regard.lens.assemble:LayerRun.continue_with",
    "regard.lens.captured_call:split_mask",
    "regard.lens.check_rebuild:rebuild",
    "regard.lens.find_attention:AttentionFinder.flush",
    "regard.lens.find_attention:AttentionFinder.hear",
    "regard.lens.off_heap:keep",
    "regard.lens.softmax_call:compare_rows",
    "regard.lens.take_weights:make_call",
    "regard.lens.trace:Trace.derive",
    "regard.lens.watch:Watcher.complete",
    "regard.run.modules:Run.enter",
    "regard.run.modules:Run.leave",
    "regard.run.modules:RunningModules.push",
)
GUARDS = {  # the functions that catch errors, and what they need for it
    "modules:Hook.__call__",
    "modules:Run.contain",
    "modules:Run.is_away",
    "modules:RunningModules.leave",
    "own_work:compute.__enter__",
    "own_work:compute.__exit__",
    "own_work:is_recomputing",
    "own_work:is_tracing",
    "observer:Observer.__enter__",
    "observer:Observer.__exit__",
    "observer:Observer.__torch_dispatch__",
    "observer:Observer.ask",
    "observer:Observer.flush",
    "observer:Observer.is_deaf",
    "observer:Observer.is_infra_mode",
    "observer:Observer.save_overwritten",
    "observer:Observer.hears",
    "observer:Observer.wake",
    "observer:has_own_way",
    "patches:count_call",
    "patches:run_heard",
    "patches:run_samples",
    "patches:show_original",
}
CALLERS = {"regard.engine.device_operators": "fused"}
FILES = sorted(
    x.stem
    for file in (watch_file, modules_file)
    for x in Path(file).parent.glob("[a-z]*.py")
)


@functools.cache
def list_unguarded():
    """Return the functions that run while a watched model runs, by file."""
    found = {}
    for path in list_internals():
        module, _, name = path.partition(":")
        place = module.removeprefix("regard.lens.").removeprefix("regard.run.")
        held = getattr(*find_internal(path))
        named_in = vars(sys.modules[module])
        listed = any(  # such as READERS, which keeps what is replaced
            held in x.values() for x in named_in.values() if type(x) is dict
        )
        if callable(held) and not listed and f"{place}:{name}" not in GUARDS:
            # what the lens calls of the engine is tested with the file that calls it
            found.setdefault(CALLERS.get(place, place), []).append(path)
    return found


def find_internal(path):
    """Return the owner and the name of an internal function."""
    place, _, name = path.partition(":")
    *outer, last = name.split(".")
    owner = functools.reduce(getattr, outer, importlib.import_module(place))
    return owner, last


@functools.cache
def train_unwatched():
    warm_up()
    return perform(EVENTS["a training step"], watched=False)


def find_harm(path, kind, monkeypatch):
    """Return what an error in an internal function does to a model."""
    owner, name = find_internal(path)
    calls = []

    def fail(*args, **named):
        calls.append(path)
        raise kind("one of ours")

    plain = train_unwatched()
    before = getattr(owner, name)
    with monkeypatch.context() as patches:
        for module in [m for n, m in sys.modules.items() if n.startswith("regard.")]:
            if vars(module).get(name) is before:  # imported by name
                patches.setattr(module, name, fail)
        patches.setattr(owner, name, fail)
        watched = perform(EVENTS["a training step"], watched=True)
    harm = tell_difference(path, plain, watched)
    harm += [] if calls else [f"{path} is never called: this shows nothing"]
    return harm + ([f"{path}: {watched.unusable}"] if watched.unusable else [])


@pytest.mark.parametrize("kind", [RecursionError, MemoryError])
@pytest.mark.parametrize("path", INTERNALS)
def test_our_errors_stay_ours(path, kind, monkeypatch):
    assert find_harm(path, kind, monkeypatch) == []


@pytest.mark.parametrize("file", FILES)
def test_no_function_of_the_lens_lets_an_error_reach_the_model(file, monkeypatch):
    paths = list_unguarded().get(file, [])
    found = [find_harm(path, RuntimeError, monkeypatch) for path in paths]
    assert [x for harm in found for x in harm] == []


def test_most_functions_of_the_lens_run_in_a_training_step():
    assert sum(map(len, list_unguarded().values())) > 100
    assert {*list_unguarded()} <= {*FILES}


# --- can these tests fail? ------------------------------------------------------------


class Clumsy:
    """A lens that leaves something behind, or changes something."""

    def __init__(self, harm, repair=lambda model: None):
        self.harm, self.repair = harm, repair

    def watch(self, model):
        lens = self

        class Watch:
            def __enter__(self):
                lens.harm(model)

            def __exit__(self, *error):
                lens.repair(model)

        return Watch()


def patch_softmax(model):
    F.softmax = functools.partial(ORIGINAL)


ORIGINAL = F.softmax
HARMS = {
    "result": lambda m: m.classify.bias.data.add_(1e-6),
    "rng": lambda m: torch.rand(1),
    "hook": lambda m: m.blocks[0].register_forward_hook(lambda *_: None),
    "attribute": lambda m: setattr(m.blocks[1], "ours", 1),
    "patch": patch_softmax,
    "mode": lambda m: torch.set_grad_enabled(mode=False),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_clumsy_lens_is_found(harm, monkeypatch):
    event = EVENTS["two watches of one model"]
    plain = perform(event, watched=False)
    monkeypatch.setattr(regard, "watch", Clumsy(HARMS[harm]).watch)
    try:
        assert tell_difference(harm, plain, perform(event, watched=True))
    finally:
        F.softmax = ORIGINAL
        torch.set_grad_enabled(mode=True)


def test_the_same_outcome_is_the_same():
    for name in ("an error is caught, and the model runs again", "a training step"):
        once, again = (perform(EVENTS[name], watched=False) for _ in range(2))
        assert tell_difference(name, once, again) == []
