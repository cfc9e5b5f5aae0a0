"""Random mask formulas for Hypothesis, with the lengths they fit."""

import numpy as np
from hypothesis import strategies as st

from regard import masks


def by_part(b, h, q, k):
    """Differ by batch and head in whole tiles: even ones see all, odd ones the past."""
    return ((b + h) % 2 == 0) | (k <= q)


def by_head(b, h, q, k):
    """Differ by head only, for a single sequence."""
    return (h % 2 == 0) | (k <= q)


FUNCTIONS = [by_head, lambda b, h, q, k: h != k % 3]
BY_BATCH = [by_part, lambda b, h, q, k: (b == 1) & (q >= 0)]


def make_array(n_q, n_k, q_start, lead, some):
    """An array whose tiles are often empty or full, by batch, head, both or neither."""
    cells = np.tri(n_q, n_k, q_start, dtype=bool) | np.asarray(some).reshape(
        *lead, 1, 1
    )
    return masks.array(cells, q_start=q_start)


def leaves(n_q, n_k, q_start, batch, heads):
    """Every primitive, with data that reaches all positions of the call."""
    far = max(n_k, q_start + n_q)
    small = st.integers(0, far)
    ids = st.lists(st.integers(0, 3), min_size=far, max_size=far)
    documents = ids.map(sorted)  # what packing gives; ids alone are the hard case
    return st.one_of(
        st.just(masks.everything()),
        st.just(masks.causal()),
        st.builds(masks.window, small, small),
        st.builds(masks.last, st.integers(1, far + 1)),
        st.builds(masks.keys, small, small),
        st.builds(masks.prefix, small),
        st.builds(masks.same, st.one_of(ids, documents)),
        st.builds(
            lambda lengths: masks.padding(lengths=np.asarray(lengths)),
            st.lists(small, min_size=batch, max_size=batch),
        ),
        st.builds(
            lambda bits: masks.padding(np.asarray(bits).reshape(batch, n_k)),
            st.lists(st.booleans(), min_size=batch * n_k, max_size=batch * n_k),
        ),
        st.builds(
            lambda step: masks.where(lambda b, h, q, k: (q + 2 * k) % step == 0),
            st.integers(1, 4),
        ),
        st.builds(masks.where, st.sampled_from(FUNCTIONS + BY_BATCH * (batch > 1))),
        st.tuples(st.sampled_from([1, batch]), st.sampled_from([1, heads])).flatmap(
            lambda lead: st.lists(
                st.booleans(), min_size=lead[0] * lead[1], max_size=lead[0] * lead[1]
            ).map(lambda some: make_array(n_q, n_k, q_start, lead, some))
        ),
    )


def formulas(n_q, n_k, q_start, batch=1, heads=1):
    """Leaves combined with & | ~, and sometimes one for each head."""
    inner = st.recursive(
        leaves(n_q, n_k, q_start, batch, heads),
        lambda some: st.one_of(
            st.builds(lambda a, b: a & b, some, some),
            st.builds(lambda a, b: a | b, some, some),
            st.builds(lambda a: ~a, some),
        ),
        max_leaves=5,
    )
    by_head = st.lists(inner, min_size=heads, max_size=heads).map(masks.per_head)
    return st.one_of(inner, by_head)


@st.composite
def calls(draw, most=24):
    """A formula and the call it fits: (formula, (B, H, Nq, Nk), q_start)."""
    n_q, n_k = draw(st.integers(1, most)), draw(st.integers(1, most))
    q_start = draw(st.integers(0, most))
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    formula = draw(formulas(n_q, n_k, q_start, batch, heads))
    return formula, (batch, heads, n_q, n_k), q_start
