"""What other libraries call something, and what to write here.

    ARGUMENTS    attention(is_causal=True)         Write mask=regard.causal().
    POSITIONS    causal(8)                         Write causal().dense(8).
    OBJECTS      numpy.asarray(causal())           Write mask.dense(8).
    ATTRIBUTES   regard.sdpa                       Write regard.attention.

These names are refused, not translated: some mean the opposite in two libraries (True
in `attn_mask`), and a call that is read later should show one convention.

Next: masks/algebra.py
"""

from collections.abc import Mapping

CALLED = {"compare_seen": "compare", "open_seen": "open"}  # in the module regard

MASK = "Write mask=regard.causal()."
SCALE = "Write scale=…"
SOFTCAP = "Write softcap=…"
SINK = "Write sink=…, one logit per head."
WEIGHTS = 'Write see=("weights",), then read .weights.'
NO_DROPOUT = "There is no dropout here: leave it out."
LENGTHS = "Write mask=regard.padding(lengths=…), one length per sequence."
PACKED = "Write mask=regard.same(ids), with the number of each token's sequence."
SPLIT = "Write regard.definition.heads.split_heads(x, 8) for 8 heads of (..., N, H*D)."

ATTENTION = {
    "query": "Write q=…",
    "key": "Write k=…",
    "value": "Write v=…",
    "is_causal": MASK,
    "causal": MASK,
    "attn_mask": "Write mask=… for a bool array in which True means may attend, as in "
    "scaled_dot_product_attention; mask=~attn_mask for one of nn.MultiheadAttention; "
    "bias=… for numbers that are added to the scores.",
    "key_padding_mask": "Write mask=regard.padding(~key_padding_mask): here True is a "
    "token, not padding.",
    "attention_mask": "Write mask=regard.padding(attention_mask) if it is (B, N) with "
    "1 for tokens, mask=regard.causal() & regard.padding(attention_mask) in a decoder.",
    "block_mask": "Write mask=regard.where(block_mask.mask_mod).",
    "mask_mod": "Write mask=regard.where(mask_mod).",
    "score_mod": "Write bias=… for what it adds to the scores, as in "
    "bias=regard.masks.alibi(slopes), and softcap=… for tanh.",
    "attn_bias": "Write bias=…",
    "alibi_slopes": "Write bias=regard.masks.alibi(alibi_slopes).",
    "window_size": "Write mask=regard.causal() & regard.window(left), or "
    "mask=regard.window(left, right); None where flash_attn has -1.",
    "sliding_window": "Write mask=regard.masks.last(n), which counts the token itself.",
    "softmax_scale": SCALE,
    "sm_scale": SCALE,
    "scaling": SCALE,
    "logit_cap": SOFTCAP,
    "logits_soft_cap": SOFTCAP,
    "soft_cap": SOFTCAP,
    "sinks": SINK,
    "s_aux": SINK,
    "dropout_p": NO_DROPOUT,
    "dropout": NO_DROPOUT,
    "training": NO_DROPOUT,
    "enable_gqa": "Leave it out: k and v may always have fewer heads than q.",
    "need_weights": WEIGHTS,
    "output_attentions": WEIGHTS,
    "return_attn_probs": WEIGHTS,
    "return_weights": WEIGHTS,
    "average_attn_weights": 'Write see=("weights",), then .weights.mean(-3).',
    "return_lse": "Leave it out: .lse is always returned.",
    "cu_seqlens": PACKED,
    "cu_seqlens_q": PACKED,
    "cu_seqlens_k": PACKED,
    "document_ids": "Write mask=regard.same(document_ids).",
    "seqlens": LENGTHS,
    "lengths": LENGTHS,
    "past_key_values": "Concatenate the cached k and v with the new ones, and write "
    "q_start=… for the position of the first query.",
    "num_heads": SPLIT,
    "n_heads": SPLIT,
    "heads": SPLIT,
    "kernel": "Write regard.engine.attend(q, k, v), which chooses the fastest one.",
    "dtype": "Convert q, k and v: the output has the dtype of q.",
    "device": "Move q, k and v: everything runs where they are.",
    "tokens": "Write regard.explain(q, k, v, tokens=…).",
}
ALWAYS = "Leave it out: explain always computes every step. Write steps[name]."
LIKE = "Write like=q, for an array of the library and on the device of q."
LAYERS = "Write layers=[…], with the numbers of layers or the names of modules."
HEADS = "Write heads=[(layer, head)]."

ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "attention": ATTENTION,
    "attend": ATTENTION,
    "choose": ATTENTION,
    "explain": {
        **ATTENTION,
        **dict.fromkeys(("see", "need_weights", "output_attentions"), ALWAYS),
        "block": "Write regard.attention(q, k, v, block=512): explain keeps all steps.",
        "edit": "Write regard.attention(q, k, v, edit=…).",
    },
    "dense": {
        "device": LIKE,
        "dtype": "Convert what it returns: a mask is bool.",
        "n": "Write dense(8) for 8 × 8 tokens.",
        "N": "Write dense(8) for 8 × 8 tokens.",
        "size": "Write dense(8) for 8 × 8 tokens.",
    },
    "window": {
        "size": "Write window(n), which counts the tokens before, without itself; "
        "regard.masks.last(n) includes it."
    },
    "padding": {
        "attention_mask": "Write padding(attention_mask), with True or 1 for tokens.",
        "key_padding_mask": "Write padding(~key_padding_mask): True is a token here.",
        "mask": "Write padding(mask), with True or 1 for tokens.",
    },
    "same": {
        "document_ids": "Write same(document_ids).",
        "ids": "Write same(ids).",
        "segment_ids": "Write same(segment_ids).",
    },
    "load": {
        "torch_dtype": "Write dtype=…",
        "device": "Write model.to(device) after loading.",
        "device_map": "Write model.to(device) after loading.",
        "attn_implementation": "Leave it out: regard.watch records the fused kernel.",
        "trust_remote_code": "Leave it out: loading weights runs no code.",
        "model": "Write load(path).",
    },
    "watch": {
        "layer": LAYERS,
        "heads": "All heads of a layer are recorded. Write layers=[…] for some layers.",
        "output_attentions": "Leave it out: every weight can be read afterwards.",
        "modules": LAYERS,
        "values": 'Write keep="qkv" to record v too.',
    },
    "knock_out": {
        "head": HEADS,
        "layer": "Write layers=[layer] for all heads of it, heads=[(layer, head)] for "
        "one.",
        "tokens": "Write keys=[…] for tokens that cannot be seen.",
        "positions": "Write keys=[…] for tokens that cannot be seen.",
    },
    "check": {
        "layout": 'Write convention=regard.judge.Convention(layout="bnhd").',
        "causal": 'Write convention=regard.judge.Convention(causal="is_causal"), with '
        "the name of your function's argument.",
        "rtol": "Leave it out: tolerances follow from the precision.",
        "atol": "Leave it out: tolerances follow from the precision.",
        "dtype": 'Write convention=regard.judge.Convention(precisions=("float32",)).',
        "device": 'Write convention=regard.judge.Convention(device="cuda").',
    },
    "audit": {
        "attention_mask": "Write valid=attention_mask != 0.",
        "padding": "Write valid=…, True for tokens, or pad=… for the padding's id.",
        "mask": "Write expect=…, as in expect=regard.causal().",
    },
}
SAME = dict.fromkeys(("effect", "patch_heads"), ARGUMENTS["knock_out"])
ARGUMENTS = {**ARGUMENTS, **SAME}

POSITIONS = {
    "causal": " A mask is a formula without a size. Write causal().dense(8) for an "
    "array.",
    "dense": " Write dense((8, 8)).",
    "tiles": " Write tiles((256, 256), block=64).",
    "text": " Write text((1, 2)) for batch 1 and head 2.",
    "per_head": " Write per_head([causal(), window(2)]).",
    "where": " It makes a mask of a function fn(b, h, q, k); the `where` of arrays is "
    "that of NumPy or torch.",
    "check": " It makes its own inputs. Write check(fn).",
    "watch": " Write `with regard.watch(model) as seen:`, and run the model in it.",
    "audit": " Write expect=… for the mask that is expected.",
}

FORMULA = (
    "{} is a formula without a size. Write {}.dense(8) for an array of 8 × 8 tokens, "
    "{}.dense((B, H, Nq, Nk), like=q) for one of the library of q"
)
OBJECTS = {
    "Attended": "attention() returns one object. Write done = attention(…), then "
    'done.out, done.lse, and done.weights with see=("weights",).',
    "Mask": FORMULA.format("A mask", "mask", "mask")
    + ". Combine masks with &, | and ~.",
    "Bias": FORMULA.format("A bias", "bias", "bias") + ". Add biases with +.",
    "Step": "Write step.values for its array, step[0, 0] for a part of it.",
    "Steps": 'Write steps["weights"] for a step, steps["weights"].values for an array.',
    "Seen": "Write seen.show() for the map, seen.widget() in a notebook, seen.table() "
    "for statistics, seen.layer(0) for the record of a layer.",
    "watch": "Write `with regard.watch(model) as seen:`, run the model in the block, "
    "and read seen after it.",
    "knock_out": "Write `with regard.knock_out(model, heads=[(3, 5)]):`, and run the "
    "model in the block.",
    "patch_heads": "Write `with regard.patch_heads(model, source, heads=[(3, 5)]):`, "
    "and run the model in the block.",
}

WATCH = "Write `with regard.watch(model) as seen:`, then"
LOAD = "Write regard.load(path), for a GGUF file or a folder of safetensors."
SEE = f"{WATCH} seen.show(), seen.widget() in a notebook, or seen.page(path)."
ATTRIBUTES = {  # of the modules regard and regard.masks
    **dict.fromkeys(
        ("scaled_dot_product_attention", "sdpa", "flash_attn_func", "flex_attention"),
        "Write regard.attention(q, k, v), or regard.engine.attend for speed.",
    ),
    "attend": "Write regard.engine.attend(q, k, v).",
    "MultiheadAttention": "Write regard.nn.MultiHeadAttention(config), or "
    "regard.attention(q, k, v) without projections.",
    "softmax": 'Write regard.attention(q, k, v, see=("weights",)).weights.',
    "sliding_window": "Write regard.masks.last(n), or regard.window(n - 1).",
    "alibi": "Write regard.masks.alibi(slopes).",
    "prefix": "Write regard.masks.prefix(n).",
    "array": "Write regard.masks.array(allowed).",
    "tril": "Write regard.causal().",
    "mask": "Write regard.masks, or regard.causal().",
    "document": "Write regard.same(ids).",
    "documents": "Write regard.same(ids).",
    "bidirectional": "Write mask=None, or regard.masks.everything().",
    "everything": "Write regard.masks.everything().",
    **dict.fromkeys(("visualize", "head_view", "model_view", "show", "plot"), SEE),
    **dict.fromkeys(
        ("trace", "record", "capture", "hook", "run_with_cache"),
        "Write `with regard.watch(model) as seen:`.",
    ),
    "audit": f"{WATCH} seen.audit().",
    "save": f"{WATCH} seen.save(path).",
    "table": f"{WATCH} seen.table().",
    **dict.fromkeys(("from_pretrained", "load_model", "HookedTransformer"), LOAD),
}
