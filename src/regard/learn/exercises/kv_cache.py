"""The KV cache

A model generates one token at a time. The keys and values of earlier tokens do not
change, because no token sees the tokens after it. So they are cached, and each step
computes only the query, key and value of the new token:

    keys   = keys of the earlier tokens, then the new one       (T+1, d)
    values = values of the earlier tokens, then the new one     (T+1, dv)
    out    = softmax(q keysᵀ / √d) values                       (dv,)

No mask is needed: everything in the cache is the past or the token itself. A causal
mask that places the query at position 0 would hide all keys but the first, a bug that
has been reported for several libraries.

At the first step the cache is empty, `T = 0`, and the token sees only itself: `out` is
`v`. The outputs of all steps are the rows of causal attention over the whole sequence.

Write `decode_step(q, k, v, keys, values)`: the tuple `out, keys, values`. `q`, `k` and
`v` are the vectors of the new token; the returned `keys` and `values` have one more
row. Do not modify the arguments.

Next: online_softmax.py
"""

import numpy as np

from regard.definition.attention import attention

NAME = "decode_step"
MINUTES = 12
NEEDS = ("decoder_logits",)
EXTRA = ""
STUB = '''import numpy as np

from regard import attention


def decode_step(q, k, v, keys, values):
    """Return out (dv,), and keys (T+1, d) and values (T+1, dv) with the new token."""
    raise NotImplementedError("write me")
'''
HINTS = (
    "First append k and v to the cache, then let q attend to all of it.",
    "np.concatenate([keys, k[None]]) appends one row, even to an empty array.",
    "attention takes matrices: attention(q[None], keys, values).out[0] is the row.",
)


def spec(q, k, v, keys, values):
    keys = np.array([*keys, k])
    values = np.array([*values, v])
    scores = [q @ keys[j] / len(q) ** 0.5 for j in range(len(keys))]
    parts = [np.exp(score - max(scores)) for score in scores]
    out = sum(parts[j] / sum(parts) * values[j] for j in range(len(keys)))
    return out, keys, values


def reference(q, k, v, keys, values):
    keys = np.concatenate([keys, k[None]])
    values = np.concatenate([values, v[None]])
    return attention(q[None], keys, values).out[0], keys, values


def check(fn, rng):
    """Run a whole sequence and compare with causal attention."""
    q, k, v = rng.normal(size=(3, 7, 4))
    scores = np.where(np.tri(7) > 0, q @ k.T / 2, -np.inf)
    parts = np.exp(scores - scores.max(axis=1, keepdims=True))
    whole = parts / parts.sum(axis=1, keepdims=True) @ v
    keys, values = k[:0], v[:0]
    for i in range(7):
        out, keys, values = fn(q[i], k[i], v[i], keys, values)
        if not np.allclose(out, whole[i]):
            return (
                f"Single steps are right, but token {i} of a sequence differs from "
                "causal attention: keep no state between the calls."
            )
    return None


def draw(rng):
    shapes = [(0, 2, 2), (2, 2, 2), (2, 2, 3), (3, 4, 2), (rng.integers(4, 9), 3, 5)]
    shapes += [(18, 2, 2), (2, 18, 2), (2, 2, 18), (2, 2, 18)]
    for T, d, dv in shapes:
        q, k = 2 * rng.normal(size=(2, d))
        keys, values = rng.normal(size=(T, d)), rng.normal(size=(T, dv))
        yield q, k, rng.normal(size=dv), keys, values
    for d, dv in ((1, 1), (2, 3)):
        for sizes in ((0.003, 300, 1e5, 300, 1e5), (30, 0.03, 0.003, 0.03, 0.003)):
            shapes = ((d,), (d,), (dv,), (3, d), (3, dv))
            yield tuple(
                size * rng.normal(size=shape)
                for size, shape in zip(sizes, shapes, strict=True)
            )


def look(q, keys, values):
    scores = keys @ q / np.sqrt(len(q))
    parts = np.exp(scores - scores.max(initial=-1e9))
    return parts @ values / max(parts.sum(), 1e-300)


def grow(k, v, keys, values):
    return np.concatenate([keys, k[None]]), np.concatenate([values, v[None]])


def mistake_not_itself(q, k, v, keys, values):
    """The new token does not see itself: append k and v to the cache before you compute
    the scores."""
    return look(q, keys, values), *grow(k, v, keys, values)


def mistake_put_in_front(q, k, v, keys, values):
    """The new token is at the front of the cache: append it at the end, after the
    earlier tokens."""
    keys, values = np.concatenate([k[None], keys]), np.concatenate([v[None], values])
    return look(q, keys, values), keys, values


def mistake_cache_not_grown(q, k, v, keys, values):
    """The old cache is returned: return the keys and values with the new token."""
    return look(q, *grow(k, v, keys, values)), keys, values


def mistake_mask_from_zero(q, k, v, keys, values):
    """The query sees only the first key: its position is not 0 but after all tokens of
    the cache, so it needs no causal mask."""
    keys, values = grow(k, v, keys, values)
    return values[0], keys, values


def mistake_only_itself(q, k, v, keys, values):
    """The query attends only to its own key: let it attend to all keys of the cache."""
    return v, *grow(k, v, keys, values)


def mistake_key_as_value(q, k, v, keys, values):
    """The key is appended to the values: append v."""
    keys, values = grow(k, np.resize(k, v.shape), keys, values)
    return look(q, keys, values), keys, values


def mistake_no_scale(q, k, v, keys, values):
    """The scores are not scaled: divide them by the root of the width of q."""
    keys, values = grow(k, v, keys, values)
    return look(q * np.sqrt(len(q)), keys, values), keys, values


def mistake_output_only(q, k, v, keys, values):
    """Only the output is returned: return the new keys and values, too, for the next
    step."""
    return look(q, *grow(k, v, keys, values))


def mistake_averaged(q, k, v, keys, values):
    """All values have the same weight: it comes from the softmax of the scores."""
    keys, values = grow(k, v, keys, values)
    return values.mean(axis=0), keys, values
