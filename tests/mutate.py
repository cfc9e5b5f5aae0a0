"""Prove that the tests can fail: single edits to the source, each of which must be seen.

    python tests/mutate.py                    all of them, about four minutes
    python tests/mutate.py definition masks   those in files that begin so

Each edit is made in a copy of the source; the tests of the definition, the masks and the
blocked path then run on the copy until the first failure. A survivor is a defect of the
tests, and so is an edit that no longer applies.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax.numpy  # noqa: F401
import pytest
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parent.parent
SKIP = "not jax and not strict and not memory and not four_thousand and not long and not compiles"
CORE = ("definition", "position", "messages", "pitfalls", "masks", "blocked")
TESTS = {
    "engine": ("engine", "ring"),
    "plain": ("plain", "sample", "nn"),
    "nn": ("nn", "generation", "weights", "train"),
    "lens": ("lens", "intervene", "audit"),
    "spans.py": ("spans",),
    "show": ("show",),
    **dict.fromkeys(
        (f"show/{x}.py" for x in ("codes", "jobs", "levels", "source")), ("source",)
    ),
    "show/server.py": ("server",),
    "stats": ("stats", "walk", "tile", "presets"),
}


class Mutation(NamedTuple):
    name: str
    file: str
    old: str
    new: str


NONE = Mutation("(no edit: must pass)", "arrays.py", "import", "import")
ATTENTION, BLOCKED = "definition/attention.py", "definition/blocked.py"
PRIMITIVES, ALGEBRA = "masks/primitives.py", "masks/algebra.py"
MUTATIONS = [
    Mutation("swap q and k", ATTENTION, "pair(q * call.scale, xp.matrix_transpose(k))",
             "xp.matrix_transpose(pair(k * call.scale, xp.matrix_transpose(q)))"),
    Mutation("drop the scale", ATTENTION, "q * call.scale", "q"),
    Mutation("scale by D, not by its root", "definition/contract.py",
             "1 / math.sqrt(q.shape[-1])", "1 / q.shape[-1]"),
    Mutation("scale by the width of v", "definition/contract.py",
             "math.sqrt(q.shape[-1])", "math.sqrt(v.shape[-1])"),
    Mutation("invert the mask", ATTENTION, "where(allowed, logits,",
             "where(~allowed, logits,"),
    Mutation("mask with a finite number", ATTENTION,
             "constant(-math.inf, logits)", "constant(-1e4, logits)"),
    Mutation(
        "forget the running maximum", ATTENTION,
        "top = xp.max(logits, axis=-1, keepdims=True)",
        "top = 0 * xp.sum(scores, axis=-1, keepdims=True)",
    ),
    Mutation("cap after the bias", ATTENTION,
             "cap * xp.tanh(scores / cap))",
             "cap * xp.tanh((scores + (0 if bias is None else bias)) / cap))"),
    Mutation("lse of an empty row is 0", ATTENTION,
             "xp.where(empty, constant(-math.inf, top), top + xp.log(total))",
             "xp.where(empty, constant(0, top), top + xp.log(total))"),
    Mutation("lse in base 2", ATTENTION, "top + xp.log(total)", "top + xp.log2(total)"),
    Mutation("forget the sink", ATTENTION, "total + xp.exp(call.sink - top)", "total"),
    Mutation("let hidden values through", ATTENTION,
             "k, v = hide_unseen(k, allowed), hide_unseen(v, allowed)", "pass"),
    Mutation("heads in turn, not in groups", "definition/heads.py",
             "stacked = xp.reshape(x, (*lead, n_shared, group * n, width))",
             "stacked = xp.reshape(x[..., [i * n_shared % n_heads + i * n_shared // n_heads"
             " for i in range(n_heads)], :, :], (*lead, n_shared, group * n, width))"),
    Mutation("compute in half precision", "arrays.py",
             "xp.float32 if xp.finfo(dtype).bits < 32 else dtype", "dtype"),
    Mutation("shift the causal mask", PRIMITIVES, "near = k <= q - self.lo",
             "near = k < q - self.lo"),
    Mutation("count one more in the window", PRIMITIVES,
             "near & (k >= q - self.hi)", "near & (k >= q - self.hi - 1)"),
    Mutation("count queries from 0", "masks/grid.py", "q = q + q_start", "q = q"),
    Mutation("count tiles of keys from 0", "masks/grid.py",
             "if keys is None else keys", "if True else keys"),
    Mutation("one key too many in lengths", PRIMITIVES, "(k >= lo) & (k < hi)",
             "(k >= lo) & (k <= hi)"),
    Mutation("guess where queries start", "masks/grid.py",
             "if positional and n_q != n_k:", "if False:"),
    Mutation("prove a band full too early", PRIMITIVES,
             "(nearest >= lo) & (farthest <= hi)", "(farthest >= lo) & (nearest <= hi)"),
    Mutation("prove a band empty too early", PRIMITIVES,
             "(farthest < lo) | (nearest > hi)", "(nearest < lo) | (nearest > hi)"),
    Mutation("prove documents full too early", PRIMITIVES,
             "(q_min == q_max) & (k_min == k_max) & (q_min == k_min)",
             "(q_min == k_min) & (q_max == k_max)"),
    Mutation("or proves empty as and does", ALGEBRA,
             "Proof(left.empty & right.empty, left.full | right.full)",
             "Proof(left.empty | right.empty, left.full | right.full)"),
    Mutation("not keeps its proofs", ALGEBRA, "Proof(empty=proof.full, full=proof.empty)",
             "proof"),
    Mutation("average the parts", BLOCKED, "x[..., None] / total[..., None]",
             "0 * x[..., None] + 0.5"),
    Mutation("count the sink in every tile", BLOCKED, "replace(call, sink=None)", "call"),
    Mutation("skip undecided tiles", BLOCKED, "if kind != EMPTY:", "if kind == FULL:"),
    Mutation("no mask on undecided tiles", BLOCKED, "unmasked if kind == FULL else masked",
             "unmasked"),
    Mutation("turn pairs the other way", "definition/position.py",
             "first * cos - second * sin", "first * cos + second * sin"),
    Mutation("engine: lse of an empty row is 0", "engine/flash.py",
             "lse = lse.masked_fill(empty, -math.inf)", "pass"),
    Mutation("engine: let garbage through", "engine/flash.py",
             "torch.where(seen[:, None, :, None], x, 0)", "x"),
    Mutation("engine: a gradient of lse with the wrong sign", "engine/flash.py",
             "torch.cat([out, -column], -1)", "torch.cat([out, column], -1)"),
    Mutation("engine: a gradient from the lse of one part", "engine/tiles.py",
             "(out, lse),\n            write_bias", "(out, lse + 0.01),\n            write_bias"),
    Mutation("engine: bias in the dtype of q", "engine/tiles.py",
             "wide = accumulator(call.q)", "wide = call.q.dtype"),
    Mutation("engine: the diagonal one key early", "engine/tiles.py",
             "before, after = min(start, n_k), min(start + n_q, n_k)",
             "before, after = min(start + 1, n_k), min(start + n_q, n_k)"),
    Mutation("engine: full tiles only", "engine/tiles.py",
             "for kind in (FULL, UNDECIDED)", "for kind in (FULL,)"),
    Mutation("ring: gradients of keys do not come home", "engine/ring.py",
             "total.add_(found_before)", "pass"),
    Mutation("ring: keys counted from 0", "engine/ring.py",
             "return self.mask(b, h, q, k + self.first)",
             "return self.mask(b, h, q, k)"),
    Mutation("engine: a sink takes too much", "engine/choose.py",
             "torch.sigmoid(lse - beside)", "torch.sigmoid(lse - 2 * beside)"),
    Mutation("plain: softmax without the maximum", "plain/norm.py",
             "parts = xp.exp(x - top)", "parts = xp.exp(x)"),
    Mutation("plain: variance around 0", "plain/norm.py",
             "xp.mean(centred * centred", "xp.mean(wide * wide"),
    Mutation("plain: gate and value swapped", "plain/feedforward.py",
             "silu(hidden[..., :half]) * hidden[..., half:]",
             "silu(hidden[..., half:]) * hidden[..., :half]"),
    Mutation("plain: keys of cross-attention from x", "plain/multihead.py",
             "ends[2])(other), shared)", "ends[2])(x), shared)"),
    Mutation("plain: q and k of fused heads swapped", "plain/multihead.py",
             "for i in range(3)]", "for i in (1, 0, 2)]"),
    Mutation("plain: no residual around attention", "plain/layer.py",
             "x = x + attend(norm(", "x = attend(norm("),
    Mutation("plain: a window one token wider", "plain/decoder.py",
             "window(config.window - 1)", "window(config.window)"),
    Mutation("sample: top-p drops the token that reaches p", "plain/sample.py",
             "np.concatenate([[0.0], before[:-1]])", "before"),
    Mutation("sample: repetition makes unlikely tokens likelier", "plain/sample.py",
             "np.where(old < 0, old * factor, old / factor)", "old / factor"),
    Mutation("nn: turn pairs the other way", "nn/decoder.py",
             "np.hstack([-sin, sin])", "np.hstack([sin, -sin])"),
    Mutation("nn: padding is seen", "nn/decoder.py",
             "mask = mask & padding(valid)", "pass"),
    Mutation("nn: positions count the padding", "nn/decoder.py",
             "(valid.cumsum(1) - 1).clamp(min=0)", "valid.cumsum(1) * 0 + 1"),
    Mutation("nn: dropout in eval", "nn/attention.py",
             "if self.dropout and self.training:", "if self.dropout:"),
    Mutation("nn: keys and values of a context swapped", "nn/attention.py",
             "k = self.qkv_rows(context, h, h + shared)",
             "k = self.qkv_rows(context, h + shared, h + 2 * shared)"),
    Mutation("nn: all sequences write where the first does", "nn/cache.py",
             "at = self.start[:, None]", "at = self.start[:1, None]"),
    Mutation("nn: shorter prompts go on behind the filling", "nn/generation.py",
             "cache.lengths = ends", "pass"),
    Mutation("nn: one random stream for all", "nn/generation.py",
             "default_rng((seed, i))", "default_rng((seed, 0))"),
    Mutation("nn: pairs of a GGUF file as they are", "nn/weights.py",
             "pairs.transpose(1, 2).reshape", "pairs.reshape"),
    Mutation("nn: the gate after the values", "nn/families.py",
             '"layers.#.mlp.gate_proj": "blocks.#.feed.up",\n', ""),
    Mutation("lens: the kernel's causal mask is forgotten", "lens/intercept.py",
             "                causal=causal,\n", ""),
    Mutation("lens: only the inner lens sees inside of a module", "lens/intercept.py",
             "for sights in self.waiting:", "for sights in self.waiting[-1:]:"),
    Mutation("lens: a lens hears what another computes", "lens/intercept.py",
             "self.here.held or INSIDE.deaf", "self.here.held"),
    Mutation("lens: flex is not edited", "lens/intercept.py",
             "bend = bend_less(", "bend_less("),
    Mutation("lens: softmax keeps what is hidden", "lens/intercept.py",
             "logits, blank = lower(logits,", "_, blank = lower(logits,"),
    Mutation("lens: the engine's sink is not told", "lens/huggingface.py",
             "        sink=sink,\n", ""),
    Mutation("lens: a bias takes the mask's place", "lens/huggingface.py",
             "numbers.masked_fill(~cells, -math.inf)", "numbers"),
    Mutation("lens: keys that a cache forgot are lost", "lens/ledger.py",
             "            self.first += gone\n", ""),
    Mutation("lens: a cache written in place is not copied", "lens/ledger.py",
             "front = self.edge[:-1] if self.edge and gone == 1 else kept", "front = kept"),
    Mutation("lens: a row that sees nothing has the kernel's lse", "lens/ledger.py",
             "lse = lse.masked_fill(hidden.all(-1).expand(lse.shape), -math.inf)", "pass"),
    Mutation("lens: a view keeps what it is a view of", "lens/pages.py",
             "1.25 * size else x.clone()", "1e9 * size else x.clone()"),
    Mutation("lens: threads share their notes", "lens/watch.py",
             "self.notes.setdefault(threading.get_ident(), Notes())",
             "self.notes.setdefault(0, Notes())"),
    Mutation("lens: the worst error is the last", "lens/watch.py",
             "if not error <= self.errors.get(name, 0.0):", "if True:"),
    Mutation("spans: a token on a border is on both sides", "spans.py",
             "if 2 * (min(b, stop) - max(a, start)) > b - a > 0",
             "if min(b, stop) - max(a, start) > 0"),
    Mutation("spans: pieces are found from the start", "spans.py",
             "text.find(piece, at)", "text.find(piece)"),
    Mutation("knock_out: hides all but the hidden keys", "lens/edit.py",
             "return mask & ~cells", "return mask & cells"),
    Mutation("knock_out: a row that sees nothing is an average", "lens/edit.py",
             "return edited.masked_fill(find_blank(edited, cells), -math.inf)",
             "return edited"),
    Mutation("knock_out: gradients through -inf", "lens/edit.py",
             "torch.where(cells, torch.finfo(scores.dtype).min, scores)",
             "torch.where(cells, -math.inf, scores)"),
    Mutation("knock_out: is_causal is lost in an edit", "lens/edit.py",
             "    if causal:  #", "    if False:  #"),
    Mutation("knock_out: a slice holds its end", "lens/cut.py",
             "(positions < stop)", "(positions <= stop)"),
    Mutation("knock_out: a span is its two ends", "lens/cut.py",
             "if isinstance(given, Span):", "if False:"),
    Mutation("knock_out: every step stands at 0", "lens/editor.py",
             "start = self.now.before\n", "start = self.now.before and 0\n"),
    Mutation("knock_out: a cache never forgets", "lens/editor.py",
             "max(0, start + n_q - n_k)", "0"),
    Mutation("knock_out: padding has a position", "lens/editor.py",
             "torch.where(real, real.cumsum(1) - 1, -1)",
             "torch.arange(real.shape[1]).expand(real.shape)"),
    Mutation("knock_out: a layer that never attended is fine", "lens/editor.py",
             "for layer in self.cut.asked:", "for layer in ():"),
    Mutation("knock_out: the cut stays", "lens/intervene.py",
             "        stack.callback(CUTTERS.remove, editor)\n", ""),
    Mutation("effect: KL the other way round", "lens/intervene.py",
             "first.exp() * (first - second)", "second.exp() * (second - first)"),
    Mutation("effect: loss after and before", "lens/intervene.py",
             "else (old_loss, new_loss)", "else (new_loss, old_loss)"),
    Mutation("lens: the fast path of a module is switched off", "lens/intercept.py",
             "with torch._C.DisableTorchFunction():  # noqa: SLF001",
             "with here.inside(name, mode):"),
    Mutation("lens: a patch stays", "lens/intercept.py",
             "            makers.remove(make)", "            pass"),
    Mutation("lens: hooks stay", "lens/whereabouts.py",
             "                handle.remove()\n        self.handles.clear()",
             "                pass\n        self.handles.clear()"),
    Mutation("lens: the mode stays on after an interrupt", "lens/whereabouts.py",
             "while self.here.on:", "while False:"),
    Mutation("lens: recomputed passes count twice", "lens/whereabouts.py",
             "return bool(torch._C._current_graph_task_id() != -1)", "return False"),
    Mutation("lens: padding stays in the keys", "lens/ledger.py",
             "n_k else k[b][:, keys]", "n_k else k[b][:, : len(keys)]"),
    Mutation("lens: every step stands at 0", "lens/ledger.py",
             "        self.end += n_q\n", ""),
    Mutation("stats: masses relative to the kernel's own lse", "stats/call.py",
             "total = xp.exp(lse - known)", "total = xp.exp(lse - lse)"),
    Mutation("stats: columns forget the lse of the queries", "stats/call.py",
             "xp.concat([q, -lse], axis=-1)", "xp.concat([q, 0 * lse], axis=-1)"),
    Mutation("stats: columns forget the scale", "stats/call.py",
             "k * scale, ones", "k, ones"),
    Mutation("stats: the values are not flipped", "stats/call.py",
             "            values = xp.flip(values, axis=1)", "            pass"),
    Mutation("stats: heads in turn, not in groups", "stats/call.py",
             "k[:, None, ...], (n_shared, group, n, width)",
             "k[None, ...], (group, n_shared, n, width)"),
    Mutation("stats: half precision stays half", "stats/call.py",
             "dtype = accumulator(xp, record.q, record.k)", "dtype = record.q.dtype"),
    Mutation("stats: flip a mask that is no band", "stats/place.py",
             "if plain and shift is not None and is_banded(mask):",
             "if plain and shift is not None:"),
    Mutation("stats: a flipped band starts at its old place", "stats/place.py",
             "n_q + shift - n_k, flipped", "shift, flipped"),
    Mutation("stats: positions are rows and columns", "stats/place.py",
             "self.mask(b, h, self.q_positions[q], self.k_positions[k])",
             "self.mask(b, h, q, k)"),
    Mutation("stats: a mask in the place of the record's", "stats/place.py",
             "record.mask & within if", "within if"),
    Mutation("stats: pieces all at the first place", "stats/plan.py",
             "            at += n", "            pass"),
    Mutation("stats: calls of any mask are shared", "stats/plan.py",
             "return id(ask.record), ask.side, ask.within",
             "return id(ask.record), ask.side"),
    Mutation("stats: entropy forgets the share of a sink", "stats/rows.py",
             "lse * total - record.scale", "lse - record.scale"),
    Mutation("stats: entropy by V := K under a bias", "stats/rows.py",
             "if record.softcap is not None or record.bias is not None:",
             "if record.softcap is not None:"),
    Mutation("stats: distance from key to query", "stats/rows.py",
             "mean = at - divide(sums[..., 0], total)",
             "mean = divide(sums[..., 0], total) - at"),
    Mutation("stats: a mean over nothing is 0", "stats/rows.py",
             "nan = constant(math.nan, x)", "nan = constant(0, x)"),
    Mutation("stats: hidden queries are counted", "stats/columns.py",
             "count = count + xp.sum(look(record, lies, rows, keys), axis=1)",
             "count = count + (rows.stop - rows.start)"),
    Mutation("stats: the occurrence, not the key after it", "stats/cells.py",
             "last.get(token, -2) + 1", "last.get(token, -1)"),
    Mutation("stats: cells forget the mask", "stats/cells.py",
             "    if allowed is not None:", "    if False:"),
    Mutation("stats: a span includes its end", "stats/features.py",
             "(at < ends[:, 1])", "(at <= ends[:, 1])"),
    Mutation("walk: forgets the scale", "stats/source.py",
             "q = q.to(dtype) * record.scale", "q = q.to(dtype)"),
    Mutation("walk: forgets the softcap", "stats/source.py",
             "if self.softcap is not None:", "if False:"),
    Mutation("walk: inverts the mask", "stats/source.py",
             "masked_fill_(~allowed", "masked_fill_(allowed"),
    Mutation("walk: tiles proved by the first position only", "stats/source.py",
             "np.minimum.reduceat(at, first), np.maximum.reduceat(at, first)",
             "at[first], at[first]"),
    Mutation("walk: a blind row keeps its lse", "stats/source.py",
             "lse=lse.masked_fill(lse == -math.inf, 0)", "lse=lse"),
    Mutation("walk: undecided tiles are skipped", "stats/walk.py",
             "if pair[1] != EMPTY", "if pair[1] > 1"),
    Mutation("walk: strips are not merged", "stats/walk.py",
             "kept[-1] = reducer.merge(kept[-1], state)", "kept[-1] = state"),
    Mutation("walk: torch keeps one thread", "stats/walk.py",
             "        torch.set_num_threads(before)\n", "        pass\n"),
    Mutation("walk: rows grow without what they held", "stats/reducer.py",
             "            whole[held] = self.values\n", ""),
    Mutation("walk: moments without the distance of means", "stats/reducers.py",
             "v + w + s * share * apart.square()", "v + w"),
    Mutation("walk: offsets mirrored", "stats/reducers.py",
             "tile.weights.flip(1)", "tile.weights"),
    Mutation("walk: the later of equal keys", "stats/strongest.py",
             "weight - 1j * key", "weight + 1j * key"),
    Mutation("walk: the bound is the k-th itself", "stats/strongest.py",
             "bound[fresh] = np.nextafter(kth, 0, dtype=tops.dtype)",
             "bound[fresh] = kth"),
    Mutation("walk: the last pixel is as full as others", "stats/pooled.py",
             "(n_q - first).clamp(max=size)", "(0 * first + size)"),
    Mutation("walk: a later tile paints over", "stats/pooled.py",
             "torch.maximum(below, above, out=below)", "below.copy_(above)"),
    Mutation("tile: masked pixels count as seen", "stats/tile.py",
             "if tile.allowed is None:", "if True:"),
    Mutation("tile: the zoom rounds down", "stats/tile.py",
             "math.ceil((stop - start) / pixels)", "(stop - start) // pixels"),
    Mutation("trial: it never merges", "stats/trial.py",
             'yield "when two states are merged", [[left], [right]]',
             'yield "when two states are merged", [[left, right]]'),
    Mutation("presets: SnapKV adds up its queries", "stats/presets.py",
             ": n - last] / last)", ": n - last])"),
    Mutation("presets: a lookback ratio of sums", "stats/presets.py",
             "back = mass[..., 0] / context", "back = mass[..., 0]"),
    Mutation("presets: the diagonal counts as a duplicate", "stats/presets.py",
             "same(ids) & causal() & ~window(0)", "same(ids) & causal()"),
    Mutation("presets: a mean over queries that have no such key", "stats/presets.py",
             "count = there.sum(1)", "count = there.sum(1) * 0 + there.shape[1]"),
    Mutation("table: entropy in nats", "stats/table.py",
             'values / math.log(2) if name == "entropy" else values', "values"),
    Mutation("show: a log scale in equal steps", "show/palette.py",
             "np.log(x / self.low) / np.log(self.high / self.low)",
             "(x - self.low) / (self.high - self.low)"),
    Mutation("show: the sink stretches the scale", "show/palette.py",
             "end = max(after, FAINT) if after < top / 2 else top", "end = top"),
    Mutation("show: pool by the first cell", "show/palette.py",
             "x = np.maximum.reduceat(x, edges, axis=axis)",
             "x = np.take(x, edges, axis=axis)"),
    Mutation("show: the mask of another head", "show/palette.py",
             "cells[head if len(cells) > 1 else 0]", "cells[0]"),
    Mutation("show: a token steers the terminal", "show/text.py",
             "    label = shorten(text)\n", "    label = text[:8]\n"),
    Mutation("show: half blocks upside down", "show/text.py",
             "zip(rows[::2], rows[1::2], strict=True)",
             "zip(rows[1::2], rows[::2], strict=True)"),
    Mutation("show: pooling is not told", "show/text.py",
             "if panel.cells == (1, 1):", "if panel.cells:"),
    Mutation("show: the map upside down", "show/figure.py",
             "height * down - 0.5, -0.5)", "-0.5, height * down - 0.5)"),
    Mutation("show: labels overlap", "show/figure.py",
             "POINTS * 1.3 * figure.dpi / 72 * n", "POINTS * 0.6 * figure.dpi / 72 * n"),
    Mutation("show: masked cells get a colour", "show/figure.py",
             "np.ma.masked_array(panel.values, ~panel.allowed)",
             "np.ma.masked_array(panel.values, False)"),
    Mutation("map: codes cut instead of rounded", "show/codes.py",
             "np.rint(", "np.floor("),
    Mutation("map: codes forget the mask", "show/codes.py",
             "        codes[rows][~allowed[rows]] = MASKED\n", ""),
    Mutation("map: masks of coarse levels are not pooled", "show/levels.py",
             "allowed = halve(allowed)", "allowed = allowed[::2, ::2]"),
    Mutation("map: a preview says it is exact", "show/levels.py",
             "exact=False", "exact=True"),
    Mutation("map: any level is known", "show/source.py",
             "known = 0 <= level <= coarsest", "known = 0 <= level"),
    Mutation("map: half a table", "show/source.py",
             "whole = len(self.rows) == len(self.records)", "whole = True"),
    Mutation("map: a Host that begins so", "show/server.py",
             "hosts[0] not in self.hosts", "not hosts[0].startswith(tuple(self.hosts))"),
    Mutation("map: any Origin", "show/server.py",
             'if origins not in ([], [f"http://{hosts[0]}"]):', "if False:"),
    Mutation("map: one right token of two", "show/server.py",
             "if not all(known):", "if not any(known):"),
]  # fmt: skip


class Recorder:
    """A pytest plugin that remembers the first failure."""

    failed = ""

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.failed:
            self.failed = report.nodeid.split("::")[-1]


def run(mutation: Mutation) -> str:
    """Return the first test that fails on an edited copy, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source)
        file = source / "regard" / mutation.file
        text = file.read_text(encoding="utf-8")
        if mutation.old not in text:
            return "THE EDIT DOES NOT APPLY"
        file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        sys.path.insert(0, str(source))
        os.environ["PYTHONPATH"] = str(source)  # for the processes that tests start
        recorder = Recorder()
        names = TESTS.get(mutation.file) or TESTS.get(mutation.file.split("/")[0], CORE)
        tests = [str(ROOT / "tests" / f"test_{name}.py") for name in names]
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", SKIP]
        with Path(os.devnull).open("w") as quiet, contextlib.redirect_stdout(quiet):
            code = pytest.main([*options, *tests], plugins=[recorder])
    return recorder.failed or f"(exit {int(code)})"


def main() -> int:
    """Run all mutations, print the table, return the number of survivors."""
    torch.set_num_threads(1)
    os.environ["HYPOTHESIS_PROFILE"] = "quick"
    console = Console()
    chosen = tuple(sys.argv[1:]) or ("",)
    every = [NONE, *(m for m in MUTATIONS if m.file.startswith(chosen))]
    fork = multiprocessing.get_context("fork")  # the libraries are loaded once
    with fork.Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        found = list(
            track(pool.imap(run, every), "mutations", len(every), console=console)
        )
    table = Table("edit", "in", "seen by")
    good = [found[0] == "(exit 0)"]
    for mutation, name in zip(every, found, strict=True):
        table.add_row(mutation.name, mutation.file, name)
        good.append(mutation is NONE or name.startswith("test_"))
    console.print(table)
    seen = sum(good[2:])
    console.print(f"{seen} of {len(every) - 1} edits were seen by the tests")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
