"""Models that attend in random ways, and the judge of what a lens records of them.

    python tests/random_models.py --seeds 0-1000      a table: writing, outcomes
    python tests/random_models.py --seeds 17          the complaints about one draw

`draw_model(seed)` returns a `Draw`: one to three blocks (attention_writings.py), sizes,
dtype and how the model is called. `judge_draw(seed)` runs it three times: to write its
book of true weights, unwatched and watched. It complains if

    broke     the watch raised, or changed a bit of the output, the gradients or the RNG
    wrong     a record is not the truth to 1e-5, or its head or sequence is another one
              and no note says so; or weights changed after the softmax, and no note
    missing   an attention has no record, and no reason says why
    extra     something is recorded that is no attention
    counted   calls that the coverage counts are not those that ran

Without a complaint a block is "correct", or "reported" if a reason or note was needed.
"""

import argparse
import math
import random
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from attention_writings import (
    AFTER,
    CANONICAL,
    CHILDREN,
    EVEN,
    FILLS,
    GATES,
    LAYOUTS,
    NO_GRADIENT,
    SCALES,
    SOFTMAXES,
    TALKING,
    TOLERANCE,
    WRITINGS,
    Block,
    Call,
    Given,
    Plan,
    check_output,
    compute_weights,
)
from torch import Tensor, nn

import regard

# --- drawing a model ------------------------------------------------------------------

HEADS = ("none", "none", "classifier", "log_softmax", "codebooks")


class Model(nn.Module):
    """Some blocks, and perhaps a softmax at the end that is no attention."""

    def __init__(self, plans: Iterable[Plan], head: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(plan) for plan in plans)
        first = self.blocks[0].plan
        self.head, self.book = head, None
        self.classify = nn.Linear(first.heads * first.width, 6)

    def forward(
        self, x: Tensor, memory: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        for block in self.blocks:
            x = block(x, memory, attention_mask)
        if self.head == "none":
            return x
        if self.book is not None:
            self.book.append(Call(None))
        if self.head == "codebooks":  # the shape of attention, (B, 2, N, 3)
            return self.classify(x).unflatten(-1, (2, 3)).transpose(1, 2).softmax(-1)
        x = self.classify(x)
        return x.softmax(-1) if self.head == "classifier" else x.log_softmax(-1)

    def encode(self, *args: Any, **named: Any) -> Tensor:
        """Run outside of any forward, and attend here too."""
        out = self(*args, **named)
        x, _ = args
        q = self.classify(x[:, :1])
        k = self.classify(x)
        pooled = (q @ k.mT).softmax(-1) @ k
        if self.book is not None:
            weights = compute_weights(
                q[:, :, None], k[:, :, None], Given(None, None), scale=1.0
            )
            check_output(weights, k[:, :, None], pooled[:, :, None])
            self.book.append(Call(weights))
        return torch.cat([out.flatten(), pooled.flatten()])


@dataclass(frozen=True)
class Draw:
    """A model, its inputs, and how it is called."""

    seed: int
    model: Model
    inputs: dict[str, Tensor]
    entry: str = "forward"  # or encode, a method
    mode: str = "no_grad"  # inference_mode, grad, backward
    about: str = ""

    def run(self) -> list[Tensor]:
        """Return the output, and the gradients if there are."""
        torch.manual_seed(self.seed)
        x, memory = self.inputs["x"], self.inputs["memory"]
        named = {k: v for k, v in self.inputs.items() if k not in {"x", "memory"}}
        call = self.model if self.entry == "forward" else self.model.encode
        self.model.zero_grad(set_to_none=True)
        context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
        with context.get(self.mode, nullcontext)():
            out = call(x, memory, **named)
        if self.mode != "backward":
            return [out.detach(), torch.get_rng_state()]
        out.square().sum().backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [out.detach(), *grads, torch.get_rng_state()]

    def write_book(self) -> dict[str, list[Call]]:
        """Run it once, and return the calls of every module that has some."""
        books: dict[str, list[Call]] = {"": []}
        self.model.book = books[""]
        for i, block in enumerate(self.model.blocks):
            block.book = books[f"blocks.{i}"] = []
        try:
            replace(self, mode="grad" if self.mode == "backward" else self.mode).run()
        finally:
            for module in (self.model, *self.model.blocks):
                module.book = None
        return books

    def name(self) -> str:
        """Return what the blocks are, for a message."""
        plans = (" + ".join(b.plan.names) for b in self.model.blocks)
        return f"{self.about}; " + " | ".join(plans)


def draw_plan(rng: random.Random, sizes: tuple[int, int, int], mode: str) -> Plan:
    """Return a random way to attend."""
    heads, kv_heads, width = sizes
    whole = [x for x in WRITINGS if x != "spelled"]
    layout = rng.choice(list(LAYOUTS))
    after = rng.choice([*["nothing"] * 8, *AFTER, *sorted(TALKING)])
    if after in TALKING and layout not in CANONICAL:
        layout = rng.choice(sorted(CANONICAL))
    plan = Plan(
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        writing=rng.choice(whole) if rng.random() < 0.45 else "spelled",
        keys=rng.choice(["self", "self", "self", "cross", "learned", "zero"]),
        queries=rng.choice(["all"] * 7 + ["pooled"]),
        share=rng.choice(["repeat_interleave", "expand"]),
        layout=layout,
        scale=rng.choice(SCALES),
        cap=rng.choice(["none"] * 5 + ["tanh"]),
        bias=rng.choice(["none", "none", "none", "alibi", "relative"]),
        mask=rng.choice(["none", "causal", "window", "padding", "padding"]),
        fill=rng.choice(list(FILLS)),
        softmax=rng.choice(["F.softmax", *SOFTMAXES]),
        after=after,
        gate=rng.choice(["none"] * 4 + list(GATES)),
    )
    return settle_plan(rng, plan, mode)


def settle_plan(rng: random.Random, plan: Plan, mode: str) -> Plan:
    """Return a plan without parts that do not go together."""
    if plan.softmax in NO_GRADIENT and mode in {"grad", "backward"}:
        plan = replace(plan, softmax="log_softmax")
    if plan.writing == "spelled" and plan.mask != "none" and rng.random() < 0.1:
        plan = replace(plan, mask="blind rows", fill=rng.choice(EVEN))
    if plan.writing in CHILDREN:  # they know these only
        keys = plan.keys if plan.writing in ACCEPTS.get(plan.keys, ()) else "self"
        plan = replace(plan, queries="all", gate="none", keys=keys)
    return plan


ACCEPTS = {
    "cross": ("nn.MultiheadAttention", "nn.TransformerDecoderLayer"),
    "zero": ("nn.MultiheadAttention",),
}


def draw_plans(rng: random.Random) -> tuple[list[Plan], str]:
    """Return the blocks of a model, and how it is run."""
    choices = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1), (1, 3)]
    kv_heads, group = rng.choice(choices)
    sizes = (kv_heads * group, kv_heads, rng.choice([1, 2, 3, 4, 8]))
    mode = rng.choice(["no_grad"] * 3 + ["inference_mode", "grad", "backward"])
    return [draw_plan(rng, sizes, mode) for _ in range(rng.choice([1, 1, 2, 3]))], mode


def draw_valid(rng: random.Random, B: int, N: int) -> Tensor | None:
    """Return which tokens are no padding, or None; the first one never is."""
    if rng.random() > 0.4:
        return None
    valid = torch.ones(B, N, dtype=torch.long)
    for b in range(B):
        if N > 1 and rng.random() < 0.6:
            valid[b, rng.randint(1, N - 1) :] = 0
    return valid


def draw_model(seed: int) -> Draw:
    """Return the draw of a seed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    plans, mode = draw_plans(rng)
    H, Hk, D = plans[0].heads, plans[0].kv_heads, plans[0].width
    B, N, M = (rng.randint(1, most) for most in (3, 9, 7))
    dtype = rng.choice([torch.float32] * 8 + [torch.float64, torch.bfloat16])
    model = Model(plans, rng.choice(HEADS)).to(dtype)
    model.train(rng.random() < 0.2)
    inputs = {"x": torch.randn(B, N, H * D, dtype=dtype)}
    inputs["memory"] = torch.randn(B, M, H * D, dtype=dtype)
    valid = draw_valid(rng, B, N)
    if valid is not None:
        inputs["attention_mask"] = valid
    entry = rng.choice(["forward"] * 5 + ["encode"])
    about = f"{B=} {N=} {M=} {H=} {Hk=} {D=} {mode} {entry} {str(dtype)[6:]}"
    about += " training" if model.training else ""
    about += " padded" if valid is not None else ""
    return Draw(seed, model, inputs, entry, mode, f"{about} head={model.head}")


# --- the judge ------------------------------------------------------------------------


@dataclass
class Verdict:
    """What is to be said of one module of a draw."""

    module: str
    names: tuple[str, ...]
    complaints: list[str] = field(default_factory=list)
    reported: bool = False

    @property
    def outcome(self) -> str:
        """One word of the table."""
        if not self.complaints:
            return "reported" if self.reported else "correct"
        kind = self.complaints[0].split(":")[0]
        return kind if kind in {"broke", "counted"} else "wrong"


@dataclass(frozen=True)
class Layer:
    """What was recorded under one name."""

    name: str
    weights: dict[int, Tensor]  # (H, Nq, Nk) of each sequence
    note: str

    @property
    def base(self) -> str:
        """The name of the module."""
        return self.name.split("#")[0]

    @property
    def number(self) -> int:
        """Which attention of the module it is."""
        found = re.search(r"#(\d+)$", self.name)
        return int(found[1]) if found else 1


def read_layers(recording: Any) -> list[Layer]:
    """Return what was recorded, by name and number."""
    found: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for record, sequence in zip(recording.records, recording.sequences, strict=True):
        weights = torch.as_tensor(record.weights()).detach().to(torch.float64)
        found[record.name][sequence] = weights
    notes: dict[str, str] = defaultdict(str)
    for entry in recording.coverage:
        if getattr(entry, "attention", True):  # gates have entries of the same name
            notes[entry.name] += getattr(entry, "note", "")
    layers = [Layer(name, w, notes[name]) for name, w in found.items()]
    return sorted(layers, key=lambda x: (x.base, x.number))


def is_same(mine: Tensor, truth: Tensor, most: float) -> bool:
    """Return whether two tensors are equal to a tolerance; NaN equals nothing.

    The last keys may be left out if no query sees them, as in a cache of fixed size.
    """
    n_k = mine.shape[-1]
    if n_k < truth.shape[-1] and not bool((truth[..., n_k:] > 1e-9).any()):
        truth = truth[..., :n_k]
    if mine.shape != truth.shape:
        return False
    return mine.numel() == 0 or float((mine - truth).abs().max()) <= most


def cut_padding(truth: Tensor, valid: Tensor | None, *, own: bool) -> list[Tensor]:
    """Return (H, Nq, Nk) whole, and without the rows and keys of padding.

    own: the keys are those of the padded tokens; others are cut only if they are hidden
    """
    if valid is None:
        return [truth]
    real, (_, n_q, n_k) = valid.bool(), truth.shape
    found = [truth, truth[:, real]] if n_q == len(real) else [truth]
    for cut in found[:]:
        hidden = n_k == len(real) and not bool((cut[..., ~real] > 1e-5).any())
        if n_k == len(real) and (own or hidden):
            found.append(cut[..., real])
    return found


@dataclass(frozen=True)
class Measure:
    """How records are compared with the truth."""

    valid: Tensor | None  # (B, N): the tokens that are no padding
    most: float  # the largest difference

    def fits_exactly(self, layer: Layer, truth: Tensor, *, own: bool) -> bool:
        """Return whether every sequence has its record, with its heads in order."""
        if sorted(layer.weights) != list(range(len(truth))):
            return False
        rows = [None] * len(truth)
        if self.valid is not None and len(self.valid) == len(truth):
            rows = list(self.valid)
        return all(
            any(
                is_same(mine, x, self.most)
                for x in cut_padding(truth[b], rows[b], own=own)
            )
            for b, mine in layer.weights.items()
        )

    def fits_somehow(self, layer: Layer, truth: Tensor, *, own: bool) -> bool:
        """Return whether every recorded matrix is one of the true ones, or turned."""
        every = [
            matrix
            for sequence in truth
            for real in (None, *([] if self.valid is None else self.valid))
            for x in cut_padding(sequence, real, own=own)
            for matrix in x
        ]
        return all(
            any(
                is_same(mine, x, self.most) or is_same(mine, x.mT, self.most)
                for x in every
            )
            for heads in layer.weights.values()
            for mine in heads
        )

    def fits(self, layer: Layer, call: Call, *, whole: bool = False) -> bool:
        """Return whether a layer may be the record of a call."""
        truth = call.whole if whole else call.weights
        if truth is None:
            return False
        if self.fits_exactly(layer, truth, own=call.own):
            return True
        others = [truth] if whole else [truth, *call.others]
        return bool(layer.note) and any(
            self.fits_somehow(layer, x, own=call.own) for x in others
        )


def match_layers(
    layers: list[Layer], calls: list[Call], measure: Measure
) -> tuple[list[str], list[Call], set[int]]:
    """Return complaints, what has no record, and which calls are noted.

    Layers are numbered in the order of calls. Calls that are not recorded are passed.
    """
    complaints, at, missing, noted = [], 0, [], set()
    if len(layers) == 1 and measure.fits(layers[0], calls[0], whole=True):
        return [], [], {0} if layers[0].note else set()
    for layer in layers:
        start = at
        while at < len(calls) and not measure.fits(layer, calls[at]):
            at += 1
        if at == len(calls):
            at = start
            complaints.append(
                describe_mismatch(layer, calls[at:] or calls[-1:], measure.most)
            )
            continue
        missing += calls[start:at]
        if layer.note:
            noted.add(at)
        elif calls[at].changed:
            complaints.append(
                f"wrong: {layer.name}: its weights were changed after the softmax, "
                "and no note says so"
            )
        at += 1
    if not complaints:
        missing += calls[at:]
    return complaints, [x for x in missing if not x.optional], noted


def describe_mismatch(layer: Layer, calls: list[Call], most: float) -> str:
    """Say how a layer differs from what it should be."""
    mine = {tuple(w.shape) for w in layer.weights.values()}
    theirs = [tuple(c.weights.shape) for c in calls if c.weights is not None]
    truths = [m for c in calls if c.weights is not None for s in c.weights for m in s]
    own = [m for w in layer.weights.values() for m in w]
    off = [
        min(
            (
                float((m - t).abs().max())
                for t in truths
                if t.shape == m.shape and t.numel()
            ),
            default=math.inf,
        )
        for m in own
    ]
    worst = max(off, default=math.inf)
    kind = (
        "each is right, but in another place" if worst <= most else f"{worst:.1e} off"
    )
    note = f", note: {layer.note}" if layer.note else ", no note"
    return (
        f"wrong: {layer.name}: {len(layer.weights)} sequences of {sorted(mine)}, "
        f"expected {theirs[:2]}: {kind}{note}"
    )


def judge_module(
    verdict: Verdict, calls: list[Call], found: "Found", measure: Measure
) -> None:
    """Judge the calls of one module, and take its layers from those found."""
    places = defaultdict(list)
    for call in calls:
        if call.weights is not None:
            places[call.where].append(call)
    for where, group in places.items():
        bases = {".".join(filter(None, (verdict.module, x))) for x in where}
        layers = [x for x in found.layers if x.base in bases]
        found.claimed.update(x.name for x in layers)
        said = [x for x in found.coverage if x.name.split("#")[0] in bases]
        complaints, missing, noted = match_layers(layers, group, measure)
        verdict.complaints += complaints
        verdict.reported |= bool(noted)
        reasons = [x.reason for x in said if x.reason]
        if missing and reasons:
            verdict.reported = True
        elif missing and not complaints:
            shapes = [tuple(x.weights.shape) for x in missing]
            about = [(x.name, x.calls, getattr(x, "note", "")) for x in said]
            verdict.complaints.append(
                f"missing: {len(missing)} of {len(group)} attentions of "
                f"{verdict.module!r}, {shapes[:2]}; coverage: {about}"
            )


def judge_count(verdict: Verdict, calls: list[Call], found: "Found") -> None:
    """Complain if the coverage counts other calls than those that ran."""
    if not found.counts:
        return
    inside = [
        x for x in found.coverage if is_below(x.name, verdict.module, found.modules)
    ]
    counted = sum(x.calls for x in inside)
    expected = set(range(found.again + 1)) if not verdict.module else {0}
    for call in calls:
        expected = {a + b for a in expected for b in call.heard}
    if counted not in expected:
        verdict.complaints.append(
            f"counted: {counted} calls in {verdict.module!r}, expected {sorted(expected)}"
        )


def is_below(name: str, module: str, modules: Iterable[str]) -> bool:
    """Return whether an entry is of a module that is judged, or of a part of it."""
    base = name.split("#", maxsplit=1)[0]
    owner = max(
        (m for m in modules if (base + ".").startswith(m + ".") or not m), key=len
    )
    return owner == module


@dataclass
class Found:
    """What a watch found, and which of it was judged."""

    layers: list[Layer]
    coverage: tuple[Any, ...]
    modules: tuple[str, ...]
    counts: bool  # whether the counts of the coverage are judged
    again: int  # calls that may run once more, in a backward pass, in no module
    claimed: set[str] = field(default_factory=set)


def watch_draw(draw: Draw) -> tuple[list[Tensor], Any]:
    """Run a draw under the lens, and return its results and the recording."""
    with regard.watch(draw.model) as seen:
        results = draw.run()
    return results, seen.recording


def judge(
    draw: Draw,
    *,
    watch: Callable[[Draw], tuple[list[Tensor], Any]] = watch_draw,
    count: bool = True,
) -> list[Verdict]:
    """Return a verdict on every module of a draw.

    watch: how it is run and recorded; the tests of the judge give another one
    count: also judge how many calls the coverage counts
    """
    books, plain = draw.write_book(), draw.run()
    verdicts = {name: Verdict(name, ()) for name in books}
    for i, block in enumerate(draw.model.blocks):
        verdicts[f"blocks.{i}"].names = block.plan.names
    verdicts[""].names = (f"head: {draw.model.head}", f"entry: {draw.entry}")
    try:
        watched, recording = watch(draw)
        layers = read_layers(recording)
    except Exception as error:  # noqa: BLE001 (whatever it is, it broke the run)
        broke = f"broke: {type(error).__name__}: {error}".splitlines()[0]
        for verdict in verdicts.values():
            verdict.complaints.append(broke)
        return list(verdicts.values())
    again = sum(c.heard == (1, 2) for calls in books.values() for c in calls)
    again *= draw.mode == "backward"
    found = Found(layers, recording.coverage, tuple(books), count, again)
    same = len(plain) == len(watched) and all(map(equal_bits, plain, watched))
    valid, dtype = draw.inputs.get("attention_mask"), draw.inputs["x"].dtype
    measure = Measure(valid, TOLERANCE[dtype])
    for name, calls in books.items():
        if not same:
            verdicts[name].complaints.append("broke: the bits of the run changed")
        judge_module(verdicts[name], calls, found, measure)
        judge_count(verdicts[name], calls, found)
    for layer in found.layers:
        if layer.name not in found.claimed:
            owner = next(m for m in books if is_below(layer.name, m, books))
            verdicts[owner].complaints.insert(
                0, f"extra: {layer.name} is no attention, but recorded"
            )
    return list(verdicts.values())


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same bits, NaN too."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (x.contiguous().flatten().view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def judge_draw(seed: int, **options: Any) -> list[str]:
    """Return the complaints about one draw, each with its seed and writings."""
    draw = draw_model(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdicts = judge(draw, **options)
    return [
        f"seed {seed}, {v.module or 'the model'}: {c}\n    {draw.about}; {', '.join(v.names)}"
        for v in verdicts
        for c in v.complaints
    ]


# --- the command line -----------------------------------------------------------------


def say(line: str) -> None:
    """Print a line."""
    sys.stdout.write(line + "\n")


def print_table(verdicts: list[Verdict]) -> None:
    """Print how each way to write attention came out."""
    columns = ("correct", "reported", "wrong", "counted", "broke")
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        for name in verdict.names:
            table[name][verdict.outcome] += 1
    say(f"{'':42}" + "".join(f"{x:>9}" for x in columns))
    for name in sorted(table):
        say(f"{name:42}" + "".join(f"{table[name][x] or '.':>9}" for x in columns))
    total = Counter(x.outcome for x in verdicts)
    say(f"{'modules':42}" + "".join(f"{total[x]:>9}" for x in columns))


def main() -> None:
    """Judge some draws, and print a table of the outcomes."""
    parser = argparse.ArgumentParser(description="Judge random models.")
    parser.add_argument("--seeds", default="0-200", help="17, or 0-1000")
    parser.add_argument("--complaints", type=int, default=20, help="how many to print")
    parser.add_argument("--no-count", action="store_true", help="do not judge counts")
    given = parser.parse_args()
    first, _, last = given.seeds.partition("-")
    verdicts, shown, bad = [], 0, 0
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for seed in range(int(first), int(last or int(first) + 1)):
        draw = draw_model(seed)
        own = judge(draw, count=not given.no_count)
        verdicts += own
        bad += any(v.complaints for v in own)
        for v in own:
            for complaint in v.complaints:
                if shown < given.complaints:
                    say(f"seed {seed} {v.module!r}: {complaint}\n    {draw.about}")
                    say(f"    {', '.join(v.names)}")
                shown += 1
    print_table(verdicts)
    say(f"{bad} draws with complaints, {shown} complaints")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
