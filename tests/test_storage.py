"""Kernels that store tokens packed, in pages or in a cache: how they are called."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from broken.storage import (
    CACHE,
    PAGED,
    VARLEN,
    attend,
    cached,
    packed,
    paged,
    writes_one_late,
)

import regard
from regard.errors import OptionError
from regard.judge.case import LEVELS
from regard.judge.convention import Convention, declare_storage, read_convention
from regard.judge.inputs import END, Inputs, compute_expected
from regard.judge.plugin import AttentionCases
from regard.judge.run_check import CASES, check, judge, order_cases
from regard.judge.storage import Storage, read_storage
from regard.judge.storage_cases import STORED
from regard.judge.stored_call import CachedCall, PackedCall, PagedCall
from regard.judge.subject import Subject

PAGE = Path(__file__).parent.parent / "docs" / "howto" / "judge-a-serving-kernel.md"
LENGTHS = ((2, 3), (1, 1), (4, 5))
FORMS = {packed: VARLEN, paged: PAGED, cached: CACHE}


@pytest.fixture
def inputs(rng):
    shape = {"q": (3, 2, 4, 8), "k": (3, 2, 5, 8), "v": (3, 2, 5, 6)}
    arrays = {name: rng.normal(size=size) for name, size in shape.items()}
    return Inputs(**arrays, lengths=LENGTHS)


@pytest.mark.parametrize("fn", FORMS, ids=lambda x: x.__name__)
def test_right_kernels_pass_in_both_layouts(fn):
    words = Convention(**FORMS[fn], precisions=("float64", "float32"))
    report = check(fn, words, level="complete")
    assert report.ok, str(report)
    status = {x.name: x.status for x in report.verdicts}
    own = [x.name for x in STORED if x.storage == words.storage.kind]
    own = [name for name in own if name in status]
    assert len(own) >= 3
    assert {status[name] for name in own} == {"passed"}
    ordinary = {"many_heads", "many_batches", "scale_is_one_over_root_width"}
    assert {status[name] for name in ordinary} == {"passed"}

    def heads_first(q, stored_k, stored_v, **options):
        new = {n: x.swapaxes(1, 2) for n, x in options.items() if n in ("k", "v")}
        axes = (0, 1) if words.storage.kind == "varlen" else (1, 2)
        arrays = [x.swapaxes(*axes) for x in (q, stored_k, stored_v)]
        return fn(*arrays, **(options | new)).swapaxes(*axes)

    subject = Subject(heads_first, replace(words, layout="bhnd"))
    for case in STORED:
        if case.storage == words.storage.kind and case.name in own:
            assert judge(subject, case).status == "passed"


def test_ragged_sequences_are_those_of_the_definition(inputs):
    for causal, start in ((False, 0), (True, 0), (True, END)):
        out = compute_expected(replace(inputs, causal=causal, q_start=start)).out
        for b, (n, m) in enumerate(LENGTHS):
            first = m - n if start == END else 0
            mask = np.tri(n, m, first, dtype=bool) if causal else None
            q, k, v = inputs.q[b, :, :n], inputs.k[b, :, :m], inputs.v[b, :, :m]
            mask = None if mask is None else mask[None]
            right = regard.attention(q, k, v, mask).out
            np.testing.assert_allclose(out[b, :, :n], right, atol=1e-12)
            np.testing.assert_array_equal(out[b, :, n:], 0)


def test_every_way_to_store_gives_the_definition(inputs):
    alike = replace(inputs, q=inputs.q[:, :, :1], lengths=((1, 3), (1, 1), (1, 5)))
    for fn, words in FORMS.items():
        given = inputs if fn is packed else alike
        answer = Subject(fn, Convention(**words)).ask(given)
        np.testing.assert_allclose(
            answer.out, compute_expected(given).out, atol=1e-12, err_msg=fn.__name__
        )
        assert answer.changed == ()


def test_tokens_are_packed_without_padding(inputs):
    words = Convention(**VARLEN)
    form = PackedCall(packed, words, Subject(packed, words).library)
    q, k, v = form.leaves(inputs)
    assert (q.shape, k.shape, v.shape) == ((7, 2, 8), (9, 2, 8), (9, 2, 6))
    np.testing.assert_array_equal(k[4:], inputs.k[2, :, :5].swapaxes(0, 1))
    said = form.describe(inputs)
    assert said["cu_q"].tolist() == [0, 2, 3, 7]
    assert said["cu_k"].tolist() == [0, 3, 4, 9]
    assert (said["max_q"], said["max_k"]) == (4, 5)


def test_pages_belong_to_one_sequence_and_the_rest_is_strange(inputs):
    words = Convention(**PAGED)
    form = PagedCall(paged, words, Subject(paged, words).library)
    table = form.describe(inputs)["table"]
    _, k, _ = form.leaves(replace(inputs, strange=np.nan))
    assert table.shape == (3, 2)
    assert table.tolist() == [[6, 0], [5, 0], [4, 3]]  # 3, 1 and 5 keys; 0 is unused
    assert np.isnan(k).all((2, 3)).sum() == k.shape[0] * 4 - 9
    np.testing.assert_array_equal(k[table[2, 1], 0], inputs.k[2, :, 4])


def test_a_cache_holds_the_past_and_then_the_new_keys(inputs):
    words = Convention(**CACHE)
    form = CachedCall(cached, words, Subject(cached, words).library)
    given = replace(inputs, q=inputs.q[:, :, :1], lengths=((1, 3), (1, 1), (1, 5)))
    before, after = (form.fill_caches(given, new=x)[0] for x in (False, True))
    assert before.shape == (3, 2, 8, 8)
    for b, n in enumerate((3, 1, 5)):
        np.testing.assert_array_equal(after[b, :, :n], inputs.k[b, :, :n])
        np.testing.assert_array_equal(before[b, :, : n - 1], inputs.k[b, :, : n - 1])
        assert (before[b, :, n - 1 :] == 50).all()
        assert (after[b, :, n:] == 50).all()
    assert form.describe(given)["lengths"].tolist() == [2, 0, 4]
    (case,) = (x for x in STORED if x.name == "cache_is_written_in_place")
    assert judge(Subject(cached, words), case).status == "passed"
    found = judge(Subject(writes_one_late, words), case)
    assert (found.status, found.says[:7]) == ("failed", "k_cache")
    answer = Subject(cached, words).ask(given)
    for x, y in zip(answer.caches, form.fill_caches(given, new=True), strict=True):
        np.testing.assert_array_equal(x, y)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False
):
    assert max_seqlen_q >= int((cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max())
    assert cu_seqlens_k.dtype == torch.int32
    out = []
    for b in range(len(cu_seqlens_q) - 1):
        rows, keys = (
            slice(*x[b : b + 2].tolist()) for x in (cu_seqlens_q, cu_seqlens_k)
        )
        a, b_, c = (x.swapaxes(0, 1).float() for x in (q[rows], k[keys], v[keys]))
        n, m = a.shape[1], b_.shape[1]
        seen = torch.ones(n, m, dtype=torch.bool).tril(m - n if causal else m)
        x = (a @ b_.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
        out.append((x.softmax(-1) @ c).swapaxes(0, 1))
    return torch.cat(out).to(q.dtype)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None
):
    pass


def paged_kernel(q, k_cache, v_cache, block_tables, seq_lens):
    pass


def test_signatures_tell_the_storage():
    words = read_convention(flash_attn_varlen_func)
    assert words.storage == Storage(
        kind="varlen",
        cu_q="cu_seqlens_q",
        cu_k="cu_seqlens_k",
        max_q="max_seqlen_q",
        max_k="max_seqlen_k",
    )
    assert (words.layout, words.causal_from, words.gradients) == ("bnhd", None, None)
    words = read_convention(flash_attn_with_kvcache)
    assert words.storage == Storage(kind="cache", lengths="cache_seqlens", k="k", v="v")
    assert (words.layout, words.causal_from, words.gradients) == ("bnhd", "end", False)
    words = read_convention(paged_kernel)
    assert words.storage == Storage(
        kind="paged", table="block_tables", lengths="seq_lens"
    )
    names = ["q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "block_table"]
    chosen = read_storage(names, "paged", page=256)
    assert (chosen.kind, chosen.page, chosen.k) == ("paged", 256, None)
    assert read_convention(lambda q, k, v, mask=None: q).storage is None
    assert read_storage(["q", "k", "v", "lengths"]) is None
    assert repr(words.storage) == (
        "Storage(kind='paged', table='block_tables', lengths='seq_lens', page=4)"
    )


def test_a_packed_kernel_of_torch_is_judged_with_its_gradients():
    words = read_convention(flash_attn_varlen_func)
    subject = Subject(flash_attn_varlen_func, replace(words, causal_from="end"))
    names = ("packed_causal_counts_from_each", "gradient_of_k", "causal_alignment")
    subject.precisions = ("float32",)
    found = [judge(subject, case) for case in CASES if case.name in names]
    assert [x.status for x in found] == ["passed"] * 3, [x.says for x in found]


def test_what_does_not_fit_is_refused():
    with pytest.raises(
        OptionError, match="needs the argument table, none of block_table"
    ):
        Storage(kind="paged", lengths="lengths")
    with pytest.raises(OptionError, match='storage "pages", expected one of varlen'):
        Storage(kind="pages")
    with pytest.raises(OptionError, match='layout "nd", expected one of bhnd, bnhd'):
        Convention(layout="nd", storage=VARLEN["storage"])
    with pytest.raises(OptionError, match='an argument "cu_q", the function has q, k'):
        Subject(attend, Convention(**VARLEN))
    with pytest.raises(OptionError, match="JAX arrays cannot be changed in place"):
        Subject(cached, Convention(**CACHE, library="jax"))
    assert declare_storage(Convention(), None) == Convention()


def test_cases_about_a_storage_are_asked_only_of_it_and_come_first():
    plain = {case.name for case in order_cases("kernel")}
    assert not plain & {case.name for case in STORED}
    for kind in ("varlen", "paged", "cache"):
        ordered = [case.name for case in order_cases("kernel", kind)]
        own = [case.name for case in STORED if case.storage == kind]
        assert set(ordered) == plain | set(own)
        assert set(ordered[2 : 2 + len(own)]) == set(own)
        assert len(own) >= 4
    for level in LEVELS:
        assert len(order_cases(level, "cache")) > len(order_cases(level))


def test_the_page_lists_every_case_and_short_adapters():
    page = PAGE.read_text("utf-8")
    for case in STORED:
        line = f"| {case.name} | {case.storage} | {case.level} | {case.says} | {case.mend} |"
        assert line in page
    for name in ("packed", "paged", "cached"):
        body = re.search(rf"(?m)^def {name}\(.*\n((    .*\n)+)", page)[1]
        assert len(body.splitlines()) <= 5


def test_the_plugin_asks_the_cases_of_the_storage():
    class Cached(AttentionCases):
        attention = staticmethod(cached)
        convention = Convention(**CACHE, precisions=("float64",))
        level = "basic"

    class Names:
        fixturenames = ("regard_case",)

        def parametrize(self, _, names):
            self.names = names

    asked = Names()
    Cached().pytest_generate_tests(asked)
    assert "stale_cache_is_not_read" in asked.names
    assert Cached.judge()["stale_cache_is_not_read"].status == "passed"
