"""Which attention of the field falls into which pitfall, each under its own convention.

    python benchmarks/check.py            writes check.json and docs/check.md

It needs keras, flax and x-transformers beside the judges of the tests. What a library
documents is declared (layout, polarity, alignment); what remains is said in the table.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from marks import fill

os.environ.setdefault("KERAS_BACKEND", "torch")

import torch
from torch import nn

import regard
from regard.engine import attend
from regard.judge.convention import Convention, Projections
from regard.judge.run_check import check, order_cases

HERE = Path(__file__).parent
MARK = "<!-- benchmark:check -->"
SIGNS = {"passed": "✓", "failed": "✗", "not asked": "", "waiting": "…"}
SINGLE = ("float32", "float16", "bfloat16")  # best first
TORCH = Convention(library="torch", shared_heads=True)
OURS = Convention(
    mask="mask",
    causal="causal",
    q_start="q_start",
    window="window",
    bias="bias",
    scale="scale",
    softcap="softcap",
    sink="sink",
    shared_heads=True,
)


def speak(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of our own attentions with causal and window as arguments."""

    def ours(q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> Any:
        causal, left = options.pop("causal", False), options.pop("window", None)
        if causal or left is not None:
            band: Any = regard.window(left, 0 if causal else None)
            if mask is not None:  # it has a row for each query, wherever they start
                shape = (1, 1, q.shape[-2], k.shape[-2])
                start = options.pop("q_start", None)
                band = mask & band.dense(shape, q_start=start, like=mask)
            mask = band
        return run(q, k, v, mask, **options)

    return ours


def define(*arguments: Any, **options: Any) -> Any:
    """Run the definition and look at its weights."""
    return regard.attention(*arguments, see=("weights",), **options)


def use_jax() -> tuple[Any, Convention]:
    """JAX's own function, with the lse that it calls a residual."""
    import jax  # noqa: PLC0415

    def dot_product_attention(
        q: Any, k: Any, v: Any, bias: Any = None, mask: Any = None, **rest: Any
    ) -> Any:
        out, lse = jax.nn.dot_product_attention(
            q, k, v, bias, mask, return_residual=True, **rest
        )
        return out, lse.swapaxes(1, 2)  # (B, N, H)

    return dot_product_attention, Convention(
        layout="bnhd",
        library="jax",
        mask="mask",
        bias="bias",
        scale="scale",
        causal="is_causal",
        causal_from="start",
        window="local_window_size",
        returns=("out", "lse"),
        shared_heads=True,
        other_widths=False,  # it refuses them
    )


def use_flax() -> tuple[Any, Convention]:
    """Flax NNX."""
    from flax import nnx  # noqa: PLC0415

    return nnx.dot_product_attention, Convention(
        layout="bnhd",
        library="jax",
        mask="mask",
        bias="bias",
        causal="is_causal",
        causal_from="start",
        shared_heads=True,
        other_widths=False,  # it refuses them
    )


def use_keras() -> tuple[Any, Convention]:
    """Keras' function, on PyTorch."""
    import keras  # noqa: PLC0415

    return keras.ops.dot_product_attention, Convention(
        layout="bnhd",
        library="torch",
        mask="mask",
        bias="bias",
        scale="scale",
        causal="is_causal",
        causal_from="start",
        precisions=SINGLE,
        shared_heads=True,
        other_widths=False,
    )


def use_keras_layer() -> tuple[Any, Convention]:
    """Keras' MultiHeadAttention, its kernels given as arguments."""
    import keras  # noqa: PLC0415

    def multi_head_attention(
        x: Any, context: Any, *, Wq: Any, Wk: Any, Wv: Any, Wo: Any, **rest: Any
    ) -> Any:
        layer = keras.layers.MultiHeadAttention(
            2, 8, use_bias=False, dtype=str(x.dtype).split(".")[-1]
        )
        layer.build(tuple(x.shape), tuple(context.shape), tuple(context.shape))
        for dense, W in (("query", Wq), ("key", Wk), ("value", Wv)):
            kernel = getattr(layer, f"_{dense}_dense").kernel
            kernel.assign(W.reshape(kernel.shape))
        kernel = layer._output_dense.kernel  # noqa: SLF001
        kernel.assign(Wo.reshape(kernel.shape))
        return layer(x, context, context, **rest)

    where = Projections(heads=2, q="Wq", k="Wk", v="Wv", out="Wo", inputs_first=True)
    return multi_head_attention, Convention(
        layout="bne",
        order="xc",
        library="torch",
        mask="attention_mask",
        mask_axes="bqk",
        causal="use_causal_mask",
        causal_from="start",
        look="return_attention_scores",
        returns=("out", "weights"),
        precisions=SINGLE,
        gradients=False,  # its kernels are its own
        projections=where,
    )


def use_transformers(kind: str) -> tuple[Any, Convention]:
    """The two functions behind most models of transformers, with their own masks."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: PLC0415
    from transformers.models.llama.modeling_llama import eager_attention_forward  # noqa: PLC0415

    run = {"eager": eager_attention_forward, "sdpa": sdpa_attention_forward}[kind]

    def attention(
        q: Any, k: Any, v: Any, mask: Any = None, scaling: Any = None, **rest: Any
    ) -> Any:
        module = SimpleNamespace(
            num_key_value_groups=q.shape[1] // k.shape[1],
            is_causal=False,
            training=False,
        )
        if mask is not None and kind == "eager":  # as its mask functions make it
            hidden, low = mask.logical_not(), torch.finfo(q.dtype).min
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(hidden, low)
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        return run(module, q, k, v, mask, scaling=scale, **rest)

    words = replace(TORCH, out_layout="bnhd", mask="mask", scale="scaling")
    if kind == "eager":  # its softmax is in float32, whatever is given
        words = replace(words, precisions=SINGLE)
    else:
        words = replace(words, causal="is_causal", causal_from="start")
        words = replace(words, float_mask=True)
    return attention, replace(words, returns=("out", "weights"))


def use_x_transformers() -> tuple[Any, Convention]:
    """Attend of x-transformers; causal is an option of its constructor."""
    from x_transformers.attend import Attend  # noqa: PLC0415

    def attention(
        q: Any, k: Any, v: Any, mask: Any = None, attn_bias: Any = None, **rest: Any
    ) -> Any:
        softclamp = rest.get("softcap")
        options = {} if softclamp is None else {"logit_softclamp_value": softclamp}
        run = Attend(
            causal=rest.get("causal", False),
            scale=rest.get("scale"),
            softclamp_logits=softclamp is not None,
            **options,
        )
        out, _ = run(q, k, v, mask=mask, attn_bias=attn_bias)
        return out

    return attention, replace(
        TORCH,
        mask="mask",
        bias="attn_bias",
        scale="scale",
        softcap="softcap",
        causal="causal",
        causal_from="end",
        precisions=SINGLE,
    )


def use_sdpa() -> tuple[Any, Convention]:
    """PyTorch's function."""
    return nn.functional.scaled_dot_product_attention, replace(
        TORCH,
        mask="attn_mask",
        float_mask=True,
        scale="scale",
        causal="is_causal",
        causal_from="start",
        fixed={"enable_gqa": True},
    )


def use_flex(*, compiled: bool) -> tuple[Any, Convention]:
    """PyTorch's FlexAttention, with masks as functions; eager, or compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: PLC0415

    run: Any = torch.compile(flex_attention) if compiled else flex_attention

    def flex(
        q: Any, k: Any, v: Any, mask: Any = None, *, causal: Any = False,
        bias: Any = None, scale: Any = None, softcap: Any = None, window: Any = None,
    ) -> Any:  # fmt: skip
        (batch, heads, n_q, _), n_k = q.shape, k.shape[2]
        late = n_k - n_q
        if mask is not None and mask.ndim < q.ndim:
            raise ValueError("mask: expected (B, H, Nq, Nk)")

        def may(b: Any, h: Any, i: Any, j: Any) -> Any:
            found = j >= 0
            if mask is not None:
                found = found & mask.expand(batch, heads, n_q, n_k)[b, h, i, j]
            if causal:
                found = found & (j <= i + late)
            return found & (j >= i + late - window) if window is not None else found

        def change(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            if bias is None:
                return score
            return score + bias.expand(batch, heads, n_q, n_k)[b, h, i, j]

        blocks = None
        if mask is not None or causal or window is not None:
            blocks = create_block_mask(may, batch, heads, n_q, n_k, device="cpu")
        changed = change if softcap is not None or bias is not None else None
        return run(q, k, v, changed, blocks, scale, enable_gqa=q.shape[1] != k.shape[1])

    return flex, replace(
        TORCH,
        mask="mask",
        causal="causal",
        causal_from="end",
        bias="bias",
        scale="scale",
        softcap="softcap",
        window="window",
        gradients=not compiled,  # on a CPU it has no compiled backward pass
        precisions=SINGLE if compiled else None,
    )


def use_module() -> tuple[Any, Convention]:
    """PyTorch's MultiheadAttention."""
    torch.manual_seed(0)
    return nn.MultiheadAttention(16, 2, batch_first=True), Convention(
        layout="bne",
        library="torch",
        mask="key_padding_mask",
        mask_axes="bk",
        true_means="hide",
        look="need_weights",
        returns=("out", "mean_weights"),
        projections=Projections(heads=2, qkv="in_proj_weight", out="out_proj.weight"),
    )


SUBJECTS: dict[str, tuple[str, Callable[[], tuple[Any, Convention]]]] = {
    "definition": ("", lambda: (speak(define), OURS)),
    "engine": ("", lambda: (speak(attend), replace(OURS, library="torch"))),
    "torch sdpa": ("torch", use_sdpa),
    "flex eager": ("torch", lambda: use_flex(compiled=False)),
    "flex compiled": ("torch", lambda: use_flex(compiled=True)),
    "torch MHA": ("torch", use_module),
    "jax": ("jax", use_jax),
    "flax": ("flax", use_flax),
    "keras ops": ("keras", use_keras),
    "keras MHA": ("keras", use_keras_layer),
    "HF eager": ("transformers", lambda: use_transformers("eager")),
    "HF sdpa": ("transformers", lambda: use_transformers("sdpa")),
    "x-transformers": ("x-transformers", use_x_transformers),
}


def judge(name: str) -> dict[str, Any]:
    """Judge one attention at the highest level."""
    package, make = SUBJECTS[name]
    fn, convention = make()
    report = check(fn, convention, level="kernel", limit=120)
    return {
        "version": f"{package} {version(package)}" if package else "",
        "convention": report.convention,
        "seconds": round(report.seconds, 1),
        "cases": {x.name: x.status for x in report.verdicts},
        "failed": {x.name: x.says for x in report.failed},
    }


def render(result: dict[str, Any]) -> str:
    """Return the table as Markdown, and what each failure looked like."""
    names = list(result)
    heads = " | ".join(names)
    lines = [f"| case | {heads} |", "|---|" + ":-:|" * len(names)]
    for case in next(iter(result.values()))["cases"]:
        cells = " | ".join(
            SIGNS[result[n]["cases"].get(case, "not asked")] for n in names
        )
        lines.append(f"| {case} | {cells} |")
    counts = [list(result[n]["cases"].values()) for n in names]
    for status in ("passed", "failed"):
        cells = " | ".join(f"**{x.count(status)}**" for x in counts)
        lines.append(f"| **{status}** | {cells} |")
    lines += ["", "| attention | case | result |", "|---|---|---|"]
    for name, found in result.items():
        whose = found["version"] or "regard"
        for case, says in found["failed"].items():
            lines.append(f"| {name} ({whose}) | {case} | {says} |")
    lines += ["", "| case | level | what goes wrong | what to change |"]
    lines += ["|---|---|---|---|"]
    for each in order_cases("kernel"):
        lines.append(f"| {each.name} | {each.level} | {each.says} | {each.mend} |")
    return "\n".join(lines)


def main() -> None:
    """Judge all, or those that are named, and write the results."""
    torch.set_num_threads(1)
    path = HERE / "check.json"
    result = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for name in sys.argv[1:] or SUBJECTS:
        result[name] = judge(name)
        print(f"{name}: {result[name]['seconds']} s, {list(result[name]['failed'])}")
    result = {name: result[name] for name in SUBJECTS if name in result}
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    fill("docs/check.md", MARK, render(result))


if __name__ == "__main__":
    main()
