"""What a PyTorch user writes first: it works, or the error says what to write."""

import copy
import gc
import inspect
import pickle

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask

import regard
from regard import attention, causal, window
from regard.errors import (
    ArrayError,
    CallError,
    MaskError,
    OptionError,
    PositionError,
    ShapeError,
)
from regard.nn import CausalTransformer, Config

B, H, N, D = 2, 4, 8, 16
torch.manual_seed(0)
q, k, v = torch.randn(3, B, H, N, D)
tril = torch.ones(N, N, dtype=torch.bool).tril()
am = torch.ones(B, N, dtype=torch.long)  # an attention_mask
am[1, 5:] = 0
ids = torch.arange(N).repeat(B, 1)
model = CausalTransformer(
    Config(vocabulary=N, context=N, width=32, layers=2, heads=4, kv_heads=2)
).eval()


def ablated(*heads, **options):
    with torch.no_grad(), regard.knock_out(model, *heads, **options):
        return model(ids)


def watched(**options):
    with torch.no_grad(), regard.watch(model, **options) as seen:
        model(ids)
    return seen


SEEN = watched()
NAMES = {
    **vars(regard),
    **globals(),
    "F": functional,
    "attend": regard.engine.attend,
    "np": np,
    "qn": q.numpy(),
    "kn": k.numpy(),
    "vn": v.numpy(),
    "record": SEEN.records[0],
    "seen": SEEN,
    "flex": create_block_mask(
        lambda b, h, i, j: i >= j, None, None, N, N, device="cpu"
    ),
}

SAYS = (
    (
        "attention(q, k, v, is_causal=True)",
        CallError,
        "attention() has no argument is_causal. Write mask=regard.causal().",
    ),
    (
        "attention(q, k, v, causal=True)",
        CallError,
        "attention() has no argument causal. Write mask=regard.causal().",
    ),
    (
        "attention(q, k, v, attn_mask=tril)",
        CallError,
        "attention() has no argument attn_mask. Write mask=… for a bool array in "
        "which True means may attend, as in scaled_dot_product_attention; "
        "mask=~attn_mask for one of nn.MultiheadAttention; bias=… for numbers that "
        "are added to the scores.",
    ),
    (
        "attention(q, k, v, dropout_p=0.0)",
        CallError,
        "attention() has no argument dropout_p. There is no dropout here: leave it "
        "out.",
    ),
    (
        "attention(q, k, v, enable_gqa=True)",
        CallError,
        "attention() has no argument enable_gqa. Leave it out: k and v may always "
        "have fewer heads than q.",
    ),
    (
        "attention(q, k, v, need_weights=True)",
        CallError,
        'attention() has no argument need_weights. Write see=("weights",), then '
        "read .weights.",
    ),
    (
        "attention(q, k, v, key_padding_mask=am == 0)",
        CallError,
        "attention() has no argument key_padding_mask. Write "
        "mask=regard.padding(~key_padding_mask): here True is a token, not padding.",
    ),
    (
        "attention(q, k, v, attention_mask=am)",
        CallError,
        "attention() has no argument attention_mask. Write "
        "mask=regard.padding(attention_mask) if it is (B, N) with 1 for tokens, "
        "mask=regard.causal() & regard.padding(attention_mask) in a decoder.",
    ),
    (
        "attention(q, k, v, block_mask=flex)",
        CallError,
        "attention() has no argument block_mask. Write "
        "mask=regard.where(block_mask.mask_mod).",
    ),
    (
        "attention(q, k, v, score_mod=lambda s, b, h, i, j: s)",
        CallError,
        "attention() has no argument score_mod. Write bias=… for what it adds to "
        "the scores, as in bias=regard.masks.alibi(slopes), and softcap=… for tanh.",
    ),
    (
        "attention(q, k, v, softmax_scale=0.5)",
        CallError,
        "attention() has no argument softmax_scale. Write scale=…",
    ),
    (
        "attention(q, k, v, window_size=(2, 0))",
        CallError,
        "attention() has no argument window_size. Write mask=regard.causal() & "
        "regard.window(left), or mask=regard.window(left, right); None where "
        "flash_attn has -1.",
    ),
    (
        "attention(q, k, v, alibi_slopes=torch.ones(4))",
        CallError,
        "attention() has no argument alibi_slopes. Write "
        "bias=regard.masks.alibi(alibi_slopes).",
    ),
    (
        "attention(q, k, v, logits_soft_cap=30.0)",
        CallError,
        "attention() has no argument logits_soft_cap. Write softcap=…",
    ),
    (
        "attention(q, k, v, average_attn_weights=True)",
        CallError,
        'attention() has no argument average_attn_weights. Write see=("weights",), '
        "then .weights.mean(-3).",
    ),
    (
        "attention(q, k, v, return_lse=True)",
        CallError,
        "attention() has no argument return_lse. Leave it out: .lse is always "
        "returned.",
    ),
    (
        "attention(q, k, v, s_aux=torch.zeros(4))",
        CallError,
        "attention() has no argument s_aux. Write sink=…, one logit per head.",
    ),
    (
        "attention(q, k, v, attn_bias=torch.zeros(N, N))",
        CallError,
        "attention() has no argument attn_bias. Write bias=…",
    ),
    (
        "attention(q, k, v, sliding_window=4)",
        CallError,
        "attention() has no argument sliding_window. Write "
        "mask=regard.masks.last(n), which counts the token itself.",
    ),
    (
        "attention(q, k, v, cu_seqlens_q=torch.tensor([0, 4, 8]))",
        CallError,
        "attention() has no argument cu_seqlens_q. Write mask=regard.same(ids), "
        "with the number of each token's sequence.",
    ),
    (
        "attention(q, k, v, seqlens=[8, 5])",
        CallError,
        "attention() has no argument seqlens. Write mask=regard.padding(lengths=…),"
        " one length per sequence.",
    ),
    (
        "attention(q, k, v, past_key_values=None)",
        CallError,
        "attention() has no argument past_key_values. Concatenate the cached k and "
        "v with the new ones, and write q_start=… for the position of the first "
        "query.",
    ),
    (
        "attention(q, k, v, num_heads=4)",
        CallError,
        "attention() has no argument num_heads. Write "
        "regard.definition.heads.split_heads(x, 8) for 8 heads of (..., N, H*D).",
    ),
    (
        "attention(q, k, v, dtype=torch.float32)",
        CallError,
        "attention() has no argument dtype. Convert q, k and v: the output has the "
        "dtype of q.",
    ),
    (
        "attention(q, k, v, scales=0.5)",
        CallError,
        "attention() has no argument scales. Write scale=.",
    ),
    (
        "attention(q, k, v, nonsense=1)",
        CallError,
        "attention() has no argument nonsense. It has q, k, v, mask, bias, scale, "
        "softcap, sink, q_start, see, edit, block.",
    ),
    (
        "attention(query=q, key=k, value=v)",
        CallError,
        "attention() has no argument query. Write q=…",
    ),
    (
        "attention(q, k)",
        CallError,
        "attention() lacks v. Write attention(q, k, v).",
    ),
    (
        "attention((q, k, v))",
        CallError,
        "attention() lacks k, v. Write attention(q, k, v).",
    ),
    (
        "attention(q, k, v, None, 0.0, True)",
        CallError,
        "attention() takes (q, k, v, mask) by position, but 6 were given. Write the"
        " others by name: bias=, scale=, softcap=, sink=, q_start=, see=, edit=, "
        "block=.",
    ),
    (
        "attention(q, k, v, q=q)",
        CallError,
        "attention() got q by position and by name. Write it once.",
    ),
    (
        "attention(q, k, v, True)",
        MaskError,
        "mask is a bool, expected a bool array or a mask such as regard.causal(). "
        "Write mask=regard.causal(), or mask=None for none.",
    ),
    (
        'attention(q, k, v, "causal")',
        MaskError,
        "mask is a str, expected a bool array or a mask such as regard.causal(). "
        "Write mask=regard.causal(), or mask=None for none.",
    ),
    (
        "attention(q, k, v, causal)",
        MaskError,
        "mask is a function, expected a bool array or a mask such as "
        "regard.causal(). Write causal(): it is a function that returns a mask.",
    ),
    (
        "attention(q, k, v, torch.tril)",
        MaskError,
        "mask is a builtin_function_or_method, expected a bool array or a mask such"
        " as regard.causal(). Write regard.where(fn) for a function.",
    ),
    (
        "attention(q, k, v, flex)",
        MaskError,
        "mask is a BlockMask, expected a bool array or a mask such as "
        "regard.causal(). Write regard.where(mask.mask_mod).",
    ),
    (
        "attention(q, k, v, [causal(), window(2)])",
        MaskError,
        "mask is a list, expected a bool array or a mask such as regard.causal(). "
        "Write a & b for both, a | b for either, masks.per_head([a, b]) by head.",
    ),
    (
        "attention(q, k, v, (causal(), window(2)))",
        MaskError,
        "mask is a tuple, expected a bool array or a mask such as regard.causal(). "
        "Write a & b for both, a | b for either, masks.per_head([a, b]) by head.",
    ),
    (
        "attention(q, k, v, tril.float())",
        MaskError,
        "mask has dtype torch.float32, expected bool: True = may attend. Write mask"
        " > 0 for a mask of zeros and ones, bias=mask to add it to the scores.",
    ),
    (
        "attention(q, k, v, am.bool())",
        MaskError,
        "mask has shape (2, 8), expected one that fits (B, H, Nq, Nk) = (2, 4, 8, "
        "8). Write padding(mask) if it has a row of keys for each batch.",
    ),
    (
        "attention(q, k, v, scale=True)",
        OptionError,
        "scale=True, expected a finite number, or None.",
    ),
    (
        "attention(q, k, v, scale=torch.ones(4))",
        OptionError,
        "scale=tensor([1., 1., 1., 1.]), expected a finite number, or None.",
    ),
    (
        "attention(q, k, v, sink=True)",
        OptionError,
        "sink=True, expected a number, or one per head.",
    ),
    (
        'attention(q, k, v, sink="x")',
        OptionError,
        "sink='x', expected a number, or one per head.",
    ),
    (
        'attention(q, k, v, see="weights")',
        OptionError,
        "see='weights', expected a tuple. Write see=(\"weights\",).",
    ),
    (
        "attention(q, k, v, see=True)",
        OptionError,
        'see=True, expected a tuple. Write see=("weights",).',
    ),
    (
        'attention(q, k, v, see="all")',
        OptionError,
        "see='all', expected a tuple. Write see=(\"weights\",).",
    ),
    (
        'attention(q, k, v, edit={"weights": 0})',
        OptionError,
        "edit={'weights': 0}, expected functions by step. Write edit={\"weights\": "
        "lambda weights: …}.",
    ),
    (
        "attention(q, k, v, block=True)",
        OptionError,
        "block=True, expected rows and keys of at least 1. Write block=512.",
    ),
    (
        "attention(q[:, :, -3:], k, v, causal(), q_start=True)",
        PositionError,
        "q_start=True, expected an integer position, or one per batch. Write "
        "q_start=0 if queries and keys start together.",
    ),
    (
        "attention(q, k, None)",
        ArrayError,
        "v is None, expected an array.",
    ),
    (
        "attention(q.int(), k.int(), v.int())",
        ArrayError,
        "q has dtype torch.int32, expected floating point. Convert it, as in "
        "q.float().",
    ),
    (
        "attention(qn.astype(int), kn, vn)",
        ArrayError,
        "q has dtype int64, expected floating point. Convert it, as in "
        "q.astype(float).",
    ),
    (
        "out, weights = attention(q, k, v)",
        CallError,
        "attention() returns one object. Write done = attention(…), then done.out, "
        'done.lse, and done.weights with see=("weights",).',
    ),
    (
        "attention(q, k, v)[0]",
        CallError,
        "attention() returns one object. Write done = attention(…), then done.out, "
        'done.lse, and done.weights with see=("weights",).',
    ),
    (
        "attention(q, k, v).shape",
        AttributeError,
        "Attended has no .shape. attention() returns one object. Write done = "
        "attention(…), then done.out, done.lse, and done.weights with "
        'see=("weights",).',
    ),
    (
        "attention(q, k, v) @ torch.eye(D)",
        CallError,
        "attention() returns one object. Write done = attention(…), then done.out, "
        'done.lse, and done.weights with see=("weights",).',
    ),
    (
        "q + attention(q, k, v)",
        CallError,
        "attention() returns one object. Write done = attention(…), then done.out, "
        'done.lse, and done.weights with see=("weights",).',
    ),
    (
        "np.asarray(attention(qn, kn, vn))",
        CallError,
        "attention() returns one object. Write done = attention(…), then done.out, "
        'done.lse, and done.weights with see=("weights",).',
    ),
    (
        "torch.allclose(attention(q, k, v), q)",
        CallError,
        "attention() returns one object. Write done = attention(…), then done.out, "
        'done.lse, and done.weights with see=("weights",).',
    ),
    (
        "len(attention(q, k, v))",
        CallError,
        "attention() returns one object. Write done = attention(…), then done.out, "
        'done.lse, and done.weights with see=("weights",).',
    ),
    (
        "attend(q, k, v, is_causal=True)",
        CallError,
        "attend() has no argument is_causal. Write mask=regard.causal().",
    ),
    (
        "attend(qn, kn, vn)",
        ArrayError,
        "q is a numpy array, expected a torch tensor. Write torch.as_tensor(q), or "
        "regard.attention(q, k, v) for other libraries.",
    ),
    (
        "regard.engine.attention(q, k, v)",
        AttributeError,
        "module 'regard.engine' has no attribute 'attention'. Write "
        "regard.engine.attend.",
    ),
    (
        "regard.scaled_dot_product_attention(q, k, v)",
        AttributeError,
        "module 'regard' has no attribute 'scaled_dot_product_attention'. Write "
        "regard.attention(q, k, v), or regard.engine.attend for speed.",
    ),
    (
        "regard.sliding_window(4)",
        AttributeError,
        "module 'regard' has no attribute 'sliding_window'. Write "
        "regard.masks.last(n), or regard.window(n - 1).",
    ),
    (
        "regard.masks.sliding_window(4)",
        AttributeError,
        "module 'regard.masks' has no attribute 'sliding_window'. Write "
        "regard.masks.last(n), or regard.window(n - 1).",
    ),
    (
        "regard.masks.casual()",
        AttributeError,
        "module 'regard.masks' has no attribute 'casual'. Write regard.masks.causal.",
    ),
    (
        "regard.head_view(model)",
        AttributeError,
        "module 'regard' has no attribute 'head_view'. Write `with "
        "regard.watch(model) as seen:`, then seen.show(), seen.widget() in a "
        "notebook, or seen.page(path).",
    ),
    (
        "regard.cuasal()",
        AttributeError,
        "module 'regard' has no attribute 'cuasal'. Write regard.causal.",
    ),
    (
        'regard.from_pretrained("gpt2")',
        AttributeError,
        "module 'regard' has no attribute 'from_pretrained'. Write "
        "regard.load(path), for a GGUF file or a folder of safetensors.",
    ),
    (
        "causal(N)",
        CallError,
        "causal() takes no arguments, but 1 was given. A mask is a formula without "
        "a size. Write causal().dense(8) for an array.",
    ),
    (
        "window(size=4)",
        CallError,
        "window() has no argument size. Write window(n), which counts the tokens "
        "before, without itself; regard.masks.last(n) includes it.",
    ),
    (
        "window(-1, -1)",
        MaskError,
        "window(-1, -1): both count other tokens, expected at least 0. Write "
        "window(0) for the token itself only, None for no limit.",
    ),
    (
        "padding([8, 5])",
        MaskError,
        "valid has shape (2,) and dtype int64, expected (B, Nk) of True and False. "
        "Write padding(lengths=lengths).",
    ),
    (
        "padding(am[1].bool())",
        MaskError,
        "valid has shape (8,) and dtype torch.bool, expected (B, Nk) of True and "
        "False. Write padding(valid[None]).",
    ),
    (
        "padding(am.float())",
        MaskError,
        "valid has shape (2, 8) and dtype torch.float32, expected (B, Nk) of True "
        "and False. Write valid != 0 if it is of zeros and ones.",
    ),
    (
        "padding(attention_mask=am)",
        CallError,
        "padding() has no argument attention_mask. Write padding(attention_mask), "
        "with True or 1 for tokens.",
    ),
    (
        "same(document_ids=am)",
        CallError,
        "same() has no argument document_ids. Write same(document_ids).",
    ),
    (
        "where(tril, 0, 1)",
        CallError,
        "where() takes (fn) by position, but 3 were given. It makes a mask of a "
        "function fn(b, h, q, k); the `where` of arrays is that of NumPy or torch.",
    ),
    (
        "where(lambda q, k: k <= q)",
        CallError,
        "fn takes (q, k), expected a function fn(b, h, q, k). Write lambda b, h, q,"
        " k: …",
    ),
    (
        "attention(q, k, v, where(lambda b, h, q, k: q >= k and q - k < 3))",
        MaskError,
        "where(<lambda>) asks for the truth value of an array: b, h, q and k are "
        "arrays. Write & for and, | for or, ~ for not, each comparison in ().",
    ),
    (
        "attention(qn, kn, vn, where(lambda b, h, q, k: q >= k or q < 3))",
        MaskError,
        "where(<lambda>) asks for the truth value of an array: b, h, q and k are "
        "arrays. Write & for and, | for or, ~ for not, each comparison in ().",
    ),
    (
        "masks.alibi(8)",
        MaskError,
        "alibi(8), expected a slope for each head. Write "
        "alibi(regard.definition.position.alibi_slopes(8)).",
    ),
    (
        "masks.per_head(causal(), window(2))",
        CallError,
        "per_head() takes (masks) by position, but 2 were given. Write "
        "per_head([causal(), window(2)]).",
    ),
    (
        "masks.keys(3)",
        CallError,
        "keys() lacks hi. Write keys(lo, hi).",
    ),
    (
        "causal() + window(2)",
        CallError,
        "A mask is a formula without a size. Write mask.dense(8) for an array of 8 "
        "× 8 tokens, mask.dense((B, H, Nq, Nk), like=q) for one of the library of "
        "q. Combine masks with &, | and ~.",
    ),
    (
        "1 - causal()",
        CallError,
        "A mask is a formula without a size. Write mask.dense(8) for an array of 8 "
        "× 8 tokens, mask.dense((B, H, Nq, Nk), like=q) for one of the library of "
        "q. Combine masks with &, | and ~.",
    ),
    (
        "causal() & masks.alibi([1.0])",
        MaskError,
        "mask & Alibi: expected a mask on both sides. Write attention(q, k, v, "
        "mask, bias=bias): a bias is no mask.",
    ),
    (
        "masks.alibi([1.0]) * 2",
        CallError,
        "A bias is a formula without a size. Write bias.dense(8) for an array of 8 "
        "× 8 tokens, bias.dense((B, H, Nq, Nk), like=q) for one of the library of "
        "q. Add biases with +.",
    ),
    (
        "np.asarray(causal())",
        CallError,
        "A mask is a formula without a size. Write mask.dense(8) for an array of 8 "
        "× 8 tokens, mask.dense((B, H, Nq, Nk), like=q) for one of the library of "
        "q. Combine masks with &, | and ~.",
    ),
    (
        "torch.as_tensor(causal())",
        CallError,
        "A mask is a formula without a size. Write mask.dense(8) for an array of 8 "
        "× 8 tokens, mask.dense((B, H, Nq, Nk), like=q) for one of the library of "
        "q. Combine masks with &, | and ~.",
    ),
    (
        "(q @ k.mT).masked_fill(~causal(), 0.0)",
        CallError,
        "A mask is a formula without a size. Write mask.dense(8) for an array of 8 "
        "× 8 tokens, mask.dense((B, H, Nq, Nk), like=q) for one of the library of "
        "q. Combine masks with &, | and ~.",
    ),
    (
        "F.scaled_dot_product_attention(q, k, v, attn_mask=causal())",
        CallError,
        "A mask is a formula without a size. Write mask.dense(8) for an array of 8 "
        "× 8 tokens, mask.dense((B, H, Nq, Nk), like=q) for one of the library of "
        "q. Combine masks with &, | and ~.",
    ),
    (
        "causal()[:8, :8]",
        CallError,
        "A mask is a formula without a size. Write mask.dense(8) for an array of 8 "
        "× 8 tokens, mask.dense((B, H, Nq, Nk), like=q) for one of the library of "
        "q. Combine masks with &, | and ~.",
    ),
    (
        "list(causal())",
        CallError,
        "A mask is a formula without a size. Write mask.dense(8) for an array of 8 "
        "× 8 tokens, mask.dense((B, H, Nq, Nk), like=q) for one of the library of "
        "q. Combine masks with &, | and ~.",
    ),
    (
        "causal().shape",
        AttributeError,
        "Band has no .shape. A mask is a formula without a size. Write "
        "mask.dense(8) for an array of 8 × 8 tokens, mask.dense((B, H, Nq, Nk), "
        "like=q) for one of the library of q. Combine masks with &, | and ~.",
    ),
    (
        "causal().dense(8, 8)",
        CallError,
        "dense() takes (shape) by position, but 2 were given. Write dense((8, 8)).",
    ),
    (
        'causal().dense(8, device="cpu")',
        CallError,
        "dense() has no argument device. Write like=q, for an array of the library "
        "and on the device of q.",
    ),
    (
        "causal().dense(q)",
        MaskError,
        "shape of shape (2, 4, 8, 16), expected sizes (..., H, Nq, Nk), or a number"
        " of tokens. Write (8, 8) or (2, 4, 8, 8), or 8 for 8 × 8 tokens.",
    ),
    (
        "causal().dense((8,))",
        MaskError,
        "shape (8,), expected sizes (..., H, Nq, Nk), or a number of tokens. Write "
        "(8, 8) or (2, 4, 8, 8), or 8 for 8 × 8 tokens.",
    ),
    (
        "causal().dense((8.0, 8))",
        MaskError,
        "shape (8.0, 8), expected sizes (..., H, Nq, Nk), or a number of tokens. "
        "Write (8, 8) or (2, 4, 8, 8), or 8 for 8 × 8 tokens.",
    ),
    (
        "causal().dense(True)",
        MaskError,
        "shape True, expected sizes (..., H, Nq, Nk), or a number of tokens. Write "
        "(8, 8) or (2, 4, 8, 8), or 8 for 8 × 8 tokens.",
    ),
    (
        'causal().dense("8")',
        MaskError,
        "shape '8', expected sizes (..., H, Nq, Nk), or a number of tokens. Write "
        "(8, 8) or (2, 4, 8, 8), or 8 for 8 × 8 tokens.",
    ),
    (
        "same([0, 0, 1]).dense(4)",
        MaskError,
        "same([0, 0, 1]) covers 3 keys, but there are 4. Axes are (..., H, Nq, Nk) "
        "= (4, 4).",
    ),
    (
        "causal().tiles(256, 64)",
        CallError,
        "tiles() takes (shape) by position, but 2 were given. Write tiles((256, "
        "256), block=64).",
    ),
    (
        "explain(q, k, v, is_causal=True)",
        CallError,
        "explain() has no argument is_causal. Write mask=regard.causal().",
    ),
    (
        'explain(q, k, v, see=("weights",))',
        CallError,
        "explain() has no argument see. Leave it out: explain always computes every"
        " step. Write steps[name].",
    ),
    (
        "explain(q, k, v, block=4)",
        CallError,
        "explain() has no argument block. Write regard.attention(q, k, v, "
        "block=512): explain keeps all steps.",
    ),
    (
        'explain(q, k, v, causal(), tokens="the cat")',
        ShapeError,
        "tokens: 'the cat', expected a list with one token per position, or two: "
        "tokens=(tokens_of_queries, tokens_of_keys). Write text.split() for words.",
    ),
    (
        'explain(q, k, v, causal(), tokens=list("abcdefghi"))',
        ShapeError,
        "tokens give 8 labels for 8 queries and 9 for 8 keys. Write "
        "tokens=(tokens_of_queries, tokens_of_keys).",
    ),
    (
        "explain(q, k, v, causal(), tokens=ids)",
        ShapeError,
        "tokens: (2, 8), expected a list with one token per position, or two: "
        "tokens=(tokens_of_queries, tokens_of_keys). Write text.split() for words.",
    ),
    (
        'explain(q, k, v, causal(), tokens=[list("abcdefgh")] * 2)',
        ShapeError,
        "tokens: [['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', expected a list with one"
        " token per position, or two: tokens=(tokens_of_queries, tokens_of_keys). "
        "Write text.split() for words.",
    ),
    (
        "explain(q, k, v, causal(), tokens=8)",
        ShapeError,
        "tokens: 8, expected a list with one token per position, or two: "
        "tokens=(tokens_of_queries, tokens_of_keys). Write text.split() for words.",
    ),
    (
        "explain(q, k, v).weights",
        AttributeError,
        'Steps has no .weights. Write steps["weights"] for a step, '
        'steps["weights"].values for an array.',
    ),
    (
        "explain(q, k, v).text(1, 2)",
        CallError,
        "text() takes (at) by position, but 2 were given. Write text((1, 2)) for "
        "batch 1 and head 2.",
    ),
    (
        "explain(q, k, v).text(3)",
        OptionError,
        "at=(3,), expected an index for each of (2, 4), counted from 0.",
    ),
    (
        'explain(q, k, v)["weights"].numpy()',
        AttributeError,
        "Step has no .numpy. Write step.values for its array, step[0, 0] for a part"
        " of it.",
    ),
    (
        "explain(record.q, record.k, record.v)",
        ArrayError,
        "v is None, expected an array.",
    ),
    (
        "merge(attention(q, k, v), attention(q, k, v))",
        CallError,
        "merge() got a Attended, expected pairs (out, lse). Write merge((a.out, "
        "a.lse), (b.out, b.lse)), or merge(*pairs) for a list.",
    ),
    (
        "merge([(q, q[..., 0]), (q, q[..., 0])])",
        CallError,
        "merge() got a list, expected pairs (out, lse). Write merge((a.out, a.lse),"
        " (b.out, b.lse)), or merge(*pairs) for a list.",
    ),
    (
        "merge((q, q))",
        ShapeError,
        "merge() got out (2, 4, 8, 16) with lse (2, 4, 8, 16), expected one lse per"
        " query: (2, 4, 8).",
    ),
    (
        "merge((q, q[..., 0]), (q[:, :, :4], q[:, :, :4, 0]))",
        ShapeError,
        "merge() got out (2, 4, 8, 16), (2, 4, 4, 16), expected the same queries: "
        "parts are attention of the same q over different keys.",
    ),
    (
        "regard.load(model)",
        OptionError,
        "load() got a CausalTransformer, expected the name or the path of a model. "
        "A model in memory can be watched: regard.watch(model).",
    ),
    (
        'regard.load("x.gguf", torch_dtype=torch.float16)',
        CallError,
        "load() has no argument torch_dtype. Write dtype=…",
    ),
    (
        'regard.load("x.gguf", device="cuda")',
        CallError,
        "load() has no argument device. Write model.to(device) after loading.",
    ),
    (
        "regard.open(seen)",
        OptionError,
        "open() got a Seen, expected the path of a recording that was saved with "
        "seen.save(path).",
    ),
    (
        'watched(layers=["nope"])',
        OptionError,
        "there is no layer 'nope'. Layers are numbered from 0 in the order in which"
        " they attend, or named as in model.named_modules().",
    ),
    (
        "watched(layers=[])",
        OptionError,
        "an empty list of layers: leave it out for all.",
    ),
    (
        "watched(layers=[model])",
        OptionError,
        "there is no layer of type <class 'regard.nn.decoder.CausalTransformer'>. "
        "Layers are numbered from 0 in the order in which they attend, or named as "
        "in model.named_modules().",
    ),
    (
        "watched(heads=[0])",
        CallError,
        "watch() has no argument heads. All heads of a layer are recorded. Write "
        "layers=[…] for some layers.",
    ),
    (
        "ablated(heads=0)",
        OptionError,
        "0 is no head, expected (layer, head), both counted from 0, the layer also "
        'by its name. Write heads=[(3, 5)] or heads=[("blocks.3.attention", 5)].',
    ),
    (
        "ablated(heads=[0, 1])",
        OptionError,
        "0 is no head, expected (layer, head), both counted from 0, the layer also "
        'by its name. Write heads=[(3, 5)] or heads=[("blocks.3.attention", 5)].',
    ),
    (
        "ablated(heads=[])",
        OptionError,
        "an empty list of heads: leave it out for all.",
    ),
    (
        "ablated(head=1, layer=0)",
        CallError,
        "knock_out() has no argument head. Write heads=[(layer, head)].",
    ),
    (
        "ablated(layer=0)",
        CallError,
        "knock_out() has no argument layer. Write layers=[layer] for all heads of "
        "it, heads=[(layer, head)] for one.",
    ),
    (
        'ablated(layers=["m"])',
        OptionError,
        "there is no layer 'm'. Layers are numbered from 0 in the order in which "
        "they attend, or named as in model.named_modules().",
    ),
    (
        "ablated(keys=(am == 0)[0])",
        OptionError,
        "keys=tensor([False, False, False, False, False, False, False, False]), "
        "expected positions of tokens, counted from 0: a slice, a range or a list "
        "of integers. Write keys=slice(0, 4), or keys=[-1] for the "
        "last token.",
    ),
    (
        'ablated(keys="3")',
        OptionError,
        "keys='3', expected positions of tokens, counted from 0: a slice, a range "
        "or a list of integers. Write keys=slice(0, 4), or keys=[-1] for the "
        "last token.",
    ),
    (
        "regard.effect(model, ids, heads=[(0, 1)])",
        CallError,
        "run is a Tensor, expected a function run(model).",
    ),
    (
        "regard.effect(model, lambda: model(ids), heads=[(0, 1)])",
        CallError,
        "run takes (), expected a function run(model). Write lambda model: …",
    ),
    (
        "regard.check(torch.nn.MultiheadAttention)",
        OptionError,
        "MultiheadAttention is a class, expected a function or a module instance. "
        "Write check(MultiheadAttention(…)).",
    ),
    (
        'regard.check(attention, "bnhd")',
        OptionError,
        "convention='bnhd', expected a Convention. Write "
        'convention=regard.judge.Convention(layout="bnhd").',
    ),
    (
        'regard.check(attention, layout="bnhd")',
        CallError,
        "check() has no argument layout. Write "
        'convention=regard.judge.Convention(layout="bnhd").',
    ),
    (
        "regard.check(attention, q, k, v)",
        CallError,
        "check() takes (fn, convention) by position, but 4 were given. It makes its"
        " own inputs. Write check(fn).",
    ),
    (
        'regard.check("mymodule:f")',
        OptionError,
        "a str cannot be called, expected a function or a module. `regard check "
        "module:function` takes a name.",
    ),
    (
        "regard.check(attention, seed=None)",
        OptionError,
        "seed=None, expected an integer. Write seed=0.",
    ),
    (
        "seen.audit(attention_mask=am)",
        CallError,
        "audit() has no argument attention_mask. Write valid=attention_mask != 0.",
    ),
    (
        "seen.audit(causal())",
        CallError,
        "audit() takes no arguments, but 1 was given. Write expect=… for the mask "
        "that is expected.",
    ),
    (
        "seen.label(None)",
        CallError,
        "decode is a NoneType, expected a function decode(tokens).",
    ),
    (
        "seen.save()",
        CallError,
        "save() lacks path. Write save(path).",
    ),
    (
        "seen.plot()",
        AttributeError,
        "Seen has no .plot. Write seen.show() for the map, seen.widget() in a "
        "notebook, seen.table() for statistics, seen.layer(0) for the record of a "
        "layer.",
    ),
)


def run(call):
    try:
        return eval(call, {**NAMES, **globals()})
    except SyntaxError:
        return exec(call, {**NAMES, **globals()})


@pytest.mark.parametrize(("call", "error", "words"), SAYS, ids=[x[0] for x in SAYS])
def test_a_guess_that_does_not_fit_says_what_to_write(call, error, words):
    with pytest.raises(error) as caught:
        run(call)
    assert type(caught.value) is error
    assert str(caught.value) == words


DENSE = functional.scaled_dot_product_attention(q, k, v, attn_mask=tril)
VALID = functional.scaled_dot_product_attention(
    q, k, v, attn_mask=am.bool()[:, None, None]
)
WORKS = (  # the call, and what it must return
    ("attention(q, k, v, causal()).out", "DENSE"),
    ("attention(q, k, v, tril).out", "DENSE"),
    ("attention(q, k, v, tril.numpy()).out", "DENSE"),
    ("attention(q, k, v, tril.tolist()).out", "DENSE"),
    ("attention(q, k, v, where(flex.mask_mod)).out", "DENSE"),
    ("attend(q, k, v, tril.numpy()).out", "DENSE"),
    (
        "attention(q, k, v, bias=np.where(tril.numpy(), 0.0, -np.inf)).out",
        "DENSE",
    ),
    ("attention(q, k, v, causal(), scale=torch.tensor(0.25)).out", "DENSE"),
    ("attention(q, k, v, causal(), scale=np.float32(0.25)).out", "DENSE"),
    ("attention(q, k, v, padding(am)).out", "VALID"),
    ("attention(q, k, v, padding(am.tolist())).out", "VALID"),
    ("attention(q, k, v, padding(lengths=[8, 5])).out", "VALID"),
    (
        "attention(q, k[:, ::2], v[:, ::2]).out",
        "F.scaled_dot_product_attention(q, k[:, ::2], v[:, ::2], enable_gqa=True)",
    ),
    ("attention(q, k, v, see=['weights']).weights", "(q @ k.mT / 4).softmax(-1)"),
    ("bool(attention(q, k, v))", "True"),
    ("causal().dense(8)", "tril"),
    ("causal().dense(np.int64(8), like=q)", "tril"),
    ("causal().dense([8, 8])", "tril"),
    ("padding(am).dense(8)", "am.bool()[:, None, None].expand(-1, 1, 8, -1)"),
    (
        "masks.alibi([1.0, 0.5]).dense(2)",
        "torch.tensor([[[0, -1], [-1, 0]], [[0, -0.5], [-0.5, 0]]])",
    ),
    (
        "(padding(am) & masks.per_head([causal(), window(0)])).dense(8)",
        "am.bool()[:, None, None] & torch.stack([tril, torch.eye(8).bool()])",
    ),
    ("causal().tiles(256, block=128).kinds", "torch.tensor([[[[1, 0], [2, 1]]]])"),
    ("explain(q, k, v)['weights'].values", "(q @ k.mT / 4).softmax(-1)"),
    ("explain(q, k, v)['weights'][1, 2]", "(q @ k.mT / 4).softmax(-1)[1, 2]"),
    ("np.asarray(explain(q, k, v)['weights'])", "(q @ k.mT / 4).softmax(-1)"),
    ("dict(explain(q, k, v))['out'].values", "F.scaled_dot_product_attention(q, k, v)"),
    ("'weights' in explain(q, k, v)", "True"),
    ("'probs' in explain(q, k, v)", "False"),
    (
        "explain(q[0, 0], k[0, 0], v[0, 0], tokens=ids[0]).steps[0].rows",
        "tuple('01234567')",
    ),
    (
        "explain(q[0, 0, :2], k[0, 0], v[0, 0], tokens=(['a', 'b'], ids[0])).steps[4].rows",
        "('a', 'b')",
    ),
    ("[x.name for x in watched(layers=[1]).records[:1]]", "[seen.layers[1]]"),
    ("watched(layers=1).layers", "seen.layers[1:]"),
    ("watched(layers=seen.layers[0]).layers", "seen.layers[:1]"),
    ("watched(layers=['blocks.1']).layers", "seen.layers[1:]"),
    ("ablated(heads={0: [1], 1: [0, 2]})", "ablated([(0, 1), (1, 0), (1, 2)])"),
    ("ablated(np.array([[0, 1], [1, 2]]))", "ablated([(0, 1), (1, 2)])"),
    ("ablated(torch.tensor([[0, 1]]))", "ablated([(0, 1)])"),
    ("ablated([(np.int64(0), np.int64(1))])", "ablated([(0, 1)])"),
    ("ablated(layers=0)", "ablated(heads=[(0, h) for h in range(4)])"),
    ("ablated(layers='blocks.0')", "ablated(layers=[0])"),
    ("ablated(keys=torch.tensor([3]))", "ablated(keys=[3])"),
)


@pytest.mark.parametrize(("call", "expected"), WORKS, ids=[x[0] for x in WORKS])
def test_a_guess_with_one_meaning_works(call, expected):
    given, wanted = run(call), run(expected)
    if isinstance(wanted, torch.Tensor):
        given = torch.tensor(given) if isinstance(given, np.ndarray) else given
        assert given.shape == wanted.shape
        torch.testing.assert_close(given, wanted.to(given.dtype), rtol=0, atol=1e-6)
    else:
        assert given == wanted


def test_there_are_more_than_fifty_guesses_of_each_kind():
    assert len(SAYS) > 100
    assert len(WORKS) > 40


@pytest.mark.parametrize("name", ["watch", "knock_out"])
def test_a_block_that_is_not_entered_says_so(name):
    make = getattr(regard, name)
    with pytest.warns(RuntimeWarning, match=f"{name}\\(\\) did nothing. Write `with"):
        make(model)
        gc.collect()
    held = make(model)
    with pytest.raises(
        AttributeError, match=f"{name}\\(\\) has no .audit. Write `with"
    ):
        held.audit()
    with pytest.raises(CallError, match=f"{name}\\(\\) is not called. Write `with"):
        held(ids)
    with held:
        model(ids)


def test_a_block_that_is_entered_twice_says_so():
    block = regard.patch_heads(torch.nn.Linear(2, 2), lambda z: z)
    with pytest.raises(OptionError, match="no attention was seen"), block:
        pass
    with pytest.raises(CallError, match=r"Write `with patch_heads\(…\):` again"), block:
        pass


def test_a_type_error_inside_of_a_function_is_not_hidden():
    def wrong(*_):
        return 1 + "a"

    with pytest.raises(TypeError, match="unsupported operand") as caught:
        attention(q, k, v, edit={"weights": wrong})
    assert type(caught.value) is TypeError


def test_results_and_masks_can_be_copied_and_compared():
    done = copy.deepcopy(attention(q, k, v))
    assert torch.equal(done.out, attention(q, k, v).out)
    assert pickle.loads(pickle.dumps(causal() & window(2))) == causal() & window(2)
    assert getattr(done, "__nothing__", None) is None
    with pytest.raises(AttributeError, match="'Attended' object has no attribute"):
        getattr(done, "__nothing__")  # noqa: B009


def test_signatures_stay_readable():
    assert list(inspect.signature(attention).parameters)[:4] == ["q", "k", "v", "mask"]
    assert "kwargs" not in str(inspect.signature(regard.watch))
