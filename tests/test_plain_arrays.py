"""Weights, attentions and indices of a recording as plain arrays, on values."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from families import make_twin, quiet

import regard
from regard.errors import ArrayError, OptionError, ShapeError
from regard.recording import memory
from regard.recording.indices import read_index
from regard.recording.record import Record, Recording
from regard.seen import Seen

H, HK, N, D = 4, 2, 6, 3
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.4,
}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 32}
MODELS = {
    "Bert": ("BertModel", SIZES),
    "Llama": ("LlamaModel", SIZES | {"num_key_value_heads": 2}),
    "T5": ("T5Model", T5 | {"num_layers": 2, "num_heads": 4}),
}


def draw(name="layers.0", seed=0, mask=None, bias=None, **options):
    """Return a record in float64 and the weights that the definition gives it."""
    rng = np.random.default_rng(seed)
    n = options.get("n", N)
    q, k = rng.normal(size=(H, n, D)), rng.normal(size=(HK, n, D))
    given = {"bias": bias, "scale": 0.7, "softcap": options.get("softcap")}
    done = regard.attention(q, k, k, mask, **given, see=("weights",))
    at = {"q_positions": np.arange(n), "k_positions": np.arange(n)}
    record = Record(name=name, q=q, k=k, lse=done.lse, mask=mask, **given, **at)
    return record, done.weights


@pytest.fixture(scope="module")
def drawn():
    rng = np.random.default_rng(7)
    return [
        draw("layers.0", 1, regard.causal()),
        draw("layers.1", 2, rng.normal(size=(H, N, N)) > -1),
        draw("layers.2", 3, None, rng.normal(size=(1, N, N)), softcap=2.0),
        draw(
            "layers.3", 4, regard.masks.per_head([regard.window(i) for i in range(H)])
        ),
    ]


@pytest.fixture(scope="module")
def seen(drawn):
    records = tuple(record for record, _ in drawn)
    return Seen(Recording(model="Tiny", records=records, sequences=(0,) * 4))


INDICES = {
    "int": 2,
    "negative": -1,
    "numpy int": np.int64(3),
    "array of no axes": np.asarray(1),
    "tensor of no axes": torch.tensor(1),
    "list": [0, 3, 3],
    "negative list": [-1, 0],
    "tuple": (1, 2),
    "range": range(1, 4),
    "slice": slice(1, 3),
    "step": slice(None, None, 2),
    "backwards": slice(None, None, -1),
    "array": np.array([2, 0], np.int32),
    "tensor": torch.tensor([3, 1]),
    "tensor of one": torch.tensor([3]),
    "none of them": [],
}


def as_numpy_reads(index):
    """Return the index as NumPy takes it, for the values that are expected."""
    if isinstance(index, torch.Tensor):
        return index.numpy() if index.ndim else int(index)
    if isinstance(index, range | tuple | list):
        return np.asarray(index, int)
    return index


SOME = ("negative", "list")  # JAX compiles a program for each
KINDS = {"numpy": np.ndarray, "torch": torch.Tensor, "jax": jnp.ndarray}


@pytest.mark.parametrize(
    ("library", "which", "names"),
    [
        *((name, i, tuple(INDICES)) for name in ("numpy", "torch") for i in range(4)),
        ("jax", 1, SOME),
    ],
)
def test_every_index_of_a_record_is_that_of_numpy(drawn, library, which, names):
    record, weights = drawn[which]
    record, kind = record.to(library), KINDS[library]
    for index in (INDICES[name] for name in names):
        at = as_numpy_reads(index)
        for found, expected in (
            (record.weights(index), weights[:, at]),
            (record.weights(heads=index), weights[at]),
            (record.weights(keys=index), weights[:, :, at]),
            (
                record.weights(index, index, keys=index),
                weights[at][..., at, :][..., at],
            ),
        ):
            assert isinstance(found, kind) and found.shape == expected.shape
            np.testing.assert_allclose(np.asarray(found), expected, atol=1e-12)


def test_masks_and_logits_take_the_same_indices(drawn):
    for record, _ in drawn:
        whole, cells = record.logits(), record.allowed()
        for index in INDICES.values():
            at = as_numpy_reads(index)
            np.testing.assert_allclose(record.logits(index), whole[:, at], atol=1e-12)
            part = record.logits(keys=index, heads=index)
            np.testing.assert_allclose(part, whole[at][..., at], atol=1e-12)
            if cells is None:
                assert record.allowed(index, index, heads=index) is None
                continue
            np.testing.assert_array_equal(record.allowed(index), cells[:, at])
            np.testing.assert_array_equal(record.allowed(keys=index), cells[..., at])
            full = np.broadcast_to(cells, whole.shape)
            found = np.broadcast_to(record.allowed(heads=index), full[at].shape)
            np.testing.assert_array_equal(found, full[at])


def test_booleans_select_and_none_is_all(drawn):
    record, weights = drawn[0]
    rows = np.array([True, False, False, True, False, True])
    for given in (rows, rows.tolist(), torch.asarray(rows)):
        np.testing.assert_allclose(record.weights(given), weights[:, rows], atol=1e-12)
    np.testing.assert_allclose(record.weights(None, ...), weights, atol=1e-12)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (6, "there is no row 6, expected 0 to 5 or -6 to -1"),
        (-7, "there is no row -7, expected 0 to 5 or -6 to -1"),
        ([0, 9], "there is no row 9, expected 0 to 5 or -6 to -1"),
        (True, "row True, expected 0 to 5"),
        (1.5, r"row 1.5, expected 0 to 5 or -6 to -1, a slice, or a list"),
        ("first", "rows <U1 of shape .5,., expected a list of integers, 0 to 5"),
        ([0.0, 1.0], "rows float64 of shape .2,., expected a list of integers"),
        ([[0], [1]], "rows int64 of shape .2, 1., expected a list of integers"),
        ([[0], [1, 2]], "expected 0 to 5 or -6 to -1, a slice, or a list"),
        ([True, False], "2 booleans for rows, expected one for each of 6"),
    ],
)
def test_a_wrong_index_names_the_valid_range(drawn, index, words):
    record, _ = drawn[0]
    for ask in (record.weights, record.logits, record.allowed):
        with pytest.raises(OptionError, match=words):
            ask(index)
    with pytest.raises(OptionError, match=words.replace("row", "key")):
        record.weights(keys=index)


def test_an_index_into_nothing_is_refused():
    assert isinstance(read_index([], 0, "row"), np.ndarray)
    assert read_index([-1, 0], 4, "row").tolist() == [3, 0]  # not all libraries wrap
    with pytest.raises(OptionError, match="expected nothing: there are none"):
        read_index(0, 0, "row")


def test_weights_of_all_layers_are_those_of_the_definition(seen, drawn):
    whole = np.stack([weights for _, weights in drawn])
    found = seen.weights()
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, whole, atol=1e-12)
    for index in [*INDICES.values()][:-1]:
        at = as_numpy_reads(index)
        np.testing.assert_allclose(seen.weights(index), whole[at], atol=1e-12)
    part = seen.weights([1, -1], heads=2, rows=[0, 5], keys=slice(3))
    np.testing.assert_allclose(part, whole[[1, 3], 2][:, [0, 5], :3], atol=1e-12)
    names = seen.weights(["layers.2", 0])
    np.testing.assert_allclose(names, whole[[2, 0]], atol=1e-12)
    np.testing.assert_allclose(seen.weights("layers.1"), whole[1], atol=1e-12)


def test_a_record_is_an_array_of_its_weights(seen, drawn):
    record, weights = drawn[1]
    for one in (record, record.to("torch")):
        np.testing.assert_allclose(np.asarray(one), weights, atol=1e-12)
    np.testing.assert_allclose(np.asarray(seen), seen.weights(), atol=1e-12)
    assert np.asarray(record, np.float32).dtype == np.float32


def test_layers_are_found_by_lists_slices_and_integers_of_numpy(seen):
    records = seen.records
    assert seen.layer(np.int64(-1)) is records[3] is seen.layer("layers.3")
    assert seen.layer(torch.tensor(1)) is records[1]
    assert seen.layer([0, -2]) == (records[0], records[2])
    assert seen.layer(["layers.1", 0]) == (records[1], records[0])
    assert seen.layer(slice(None, None, -1)) == records[::-1]
    assert seen.layer(np.arange(4) % 2 == 0) == records[::2]
    for wrong in (4, -5, "layers.9", [0, 4], ["layers.0", "layers.9"]):
        with pytest.raises(OptionError, match="there is no layer"):
            seen.layer(wrong)
    with pytest.raises(OptionError, match="there is no sequence 1, expected 0 or -1"):
        seen.layer(0, sequence=1)
    assert seen.layer(0, sequence=np.int32(-1)) is records[0]


def test_layers_of_different_shapes_are_named(drawn):
    records = (drawn[0][0], drawn[1][0], draw("cross", n=4)[0])
    seen = Seen(Recording(model="Tiny", records=records, sequences=(0,) * 3))
    words = (
        r"\(4, 6, 6\) in 'layers.0' and 1 more; \(4, 4, 4\) in 'cross'. Give layers of "
        r"one shape, as seen.weights\(\['layers.0', 'layers.1'\]\)"
    )
    with pytest.raises(ShapeError, match=words):
        seen.weights()
    found = seen.weights(["layers.0", "layers.1"])
    np.testing.assert_allclose(found, [drawn[0][1], drawn[1][1]], atol=1e-12)
    shapes = [x.shape for x in seen.attentions]
    assert shapes == [(1, 4, 6, 6), (1, 4, 6, 6), (1, 4, 4, 4)]
    with pytest.raises(OptionError, match="there is nothing to stack"):
        seen.weights([])


def test_large_arrays_warn_before_they_are_made(seen, monkeypatch):
    monkeypatch.setattr(memory, "LARGE", 4 * H * N * N * 8)
    told = "takes 0.0 GB. Select less with layers=, heads=, rows= or keys="
    with pytest.warns(UserWarning, match=rf"seen.weights\(\) {told}") as caught:
        seen.weights()
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=f"seen.attentions {told}") as caught:
        assert len(seen.attentions) == 4
    assert caught[0].filename == __file__
    seen.weights(heads=0)  # a quarter of it
    monkeypatch.setattr(memory, "LARGE", H * N * N * 8)
    with pytest.warns(UserWarning, match=rf"record.weights\(\) {told}") as caught:
        seen.layer(0).weights()
    assert caught[0].filename == __file__
    seen.layer(0).weights(slice(1, None))
    monkeypatch.setattr(memory, "measure_memory", lambda: 4 * H * N * N * 8 - 1)
    with pytest.raises(OptionError, match=r"and this machine has 0\.0 GB of memory"):
        seen.weights()
    monkeypatch.undo()
    assert memory.measure_memory() > 2**28


def test_arrays_are_of_the_library_that_was_asked_for(seen, drawn):
    for name, kind in KINDS.items():
        moved = seen.to(name)
        for record, weights in zip(moved.records, (w for _, w in drawn), strict=True):
            given = (x for x in vars(record).values() if hasattr(x, "shape"))
            assert all(isinstance(x, kind) for x in given)
            np.testing.assert_allclose(
                np.asarray(record.weights()), weights, atol=1e-12
            )
        assert isinstance(moved.weights(), kind)
        assert isinstance(moved.attentions[0], kind)
    assert seen.to("numpy").layer(0).q is seen.layer(0).q
    half = torch.zeros(H, N, D, dtype=torch.bfloat16)
    record = Record(
        name="half", q=half, k=half, lse=torch.zeros(H, N), scale=1.0,
        q_positions=torch.arange(N), k_positions=torch.arange(N),
    )  # fmt: skip
    assert record.to("numpy").q.dtype == np.float32  # NumPy has no bfloat16
    assert record.to(torch).q is record.q
    with pytest.raises(ArrayError, match="'cupy', expected one of numpy, torch, jax"):
        record.to("cupy")


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    """Return a model that computes attention in a kernel, and one that writes it down."""
    torch.manual_seed(0)
    kind, options = MODELS[request.param]
    with quiet():
        model = getattr(transformers, kind)
        built = model(model.config_class(**options)).eval()
    for name, x in built.named_parameters():
        if name.endswith(("q.weight", "k.weight")):
            torch.nn.init.normal_(x, std=0.3)
    return built, make_twin(built)


def read(output):
    """Return the weights of transformers in the order in which layers are called."""
    if "encoder_attentions" not in output:
        return list(output.attentions)
    both = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    return [*output.encoder_attentions, *(w for pair in both for w in pair)]


@pytest.mark.parametrize("padded", ["", "left", "right", "all"])
@pytest.mark.parametrize("answer", [5, 7])  # 7 is as long as the padded sequence
def test_attentions_are_those_of_transformers(pair, padded, answer):
    model, twin = pair
    is_pair = "T5" in type(model).__name__
    if not is_pair and answer == 7:
        return
    torch.manual_seed(1)
    tokens, valid = torch.randint(5, 99, (2, 10)), torch.ones(2, 10, dtype=torch.long)
    if padded:
        valid[
            1,
            {"left": slice(3), "right": slice(7, None), "all": slice(7, None)}[padded],
        ] = 0
    if padded == "all":
        valid[0, 7:] = 0  # no sequence is as long as the batch
    given = {"input_ids": tokens, "attention_mask": valid}
    if is_pair:
        given["decoder_input_ids"] = torch.randint(5, 99, (2, answer))
    with torch.inference_mode():
        with regard.watch(model) as seen:
            model(**given)
        expected = read(twin(**given, output_attentions=True))
    found = seen.attentions
    assert isinstance(found, tuple)
    assert [x.shape for x in found] == [x.shape for x in expected]
    for name, mine, theirs in zip(seen.layers, found, expected, strict=True):
        own = mine.shape[2] == 10  # the queries are the tokens that are padded
        rows = valid.bool() if own else torch.ones(2, mine.shape[2], dtype=torch.bool)
        for b in (0, 1):
            difference = (mine - theirs)[b][:, rows[b]].abs().max()
            assert difference < 1e-5, name
            assert not mine[b][:, ~rows[b]].any()  # and transformers has something
    numpy = seen.to(np).attentions
    for mine, theirs in zip(numpy, found, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_attentions_of_several_calls_are_filled_up_at_the_end(pair):
    model, twin = pair
    if "T5" in type(model).__name__:
        pytest.skip("an encoder and a decoder are two lengths already")
    torch.manual_seed(2)
    calls = [torch.randint(5, 99, (1, n)) for n in (4, 7)]
    with torch.inference_mode():
        with regard.watch(model) as seen:
            for tokens in calls:
                model(input_ids=tokens)
        each = [twin(input_ids=x, output_attentions=True).attentions for x in calls]
    for i, found in enumerate(seen.attentions):
        assert found.shape == (2, 4, 7, 7)
        for b, n in enumerate((4, 7)):
            assert (found[b, :, :n, :n] - each[b][i][0]).abs().max() < 1e-5
        assert not found[0, :, 4:].any() and not found[0, :, :, 4:].any()


def test_a_generation_is_one_array_for_all_of_its_steps():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    with quiet():
        model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(5, 99, (2, 6))
    valid = torch.tensor([[1] * 6, [0, 0] + [1] * 4])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode(), quiet():
        with regard.watch(model) as seen:
            done = model.generate(tokens, attention_mask=valid, **options)
        full = torch.cat([valid, torch.ones(2, 3, dtype=torch.long)], 1)
        given = {"input_ids": done[:, :-1], "attention_mask": full}
        expected = make_twin(model)(**given, output_attentions=True).attentions
    for mine, theirs in zip(seen.attentions, expected, strict=True):
        assert mine.shape == theirs.shape == (2, 4, 9, 9)
        for b in (0, 1):
            rows = full[b].bool()
            assert (mine - theirs)[b][:, rows].abs().max() < 1e-5


def test_attentions_say_which_layers_are_missing(pair):
    model, _ = pair
    tokens = torch.randint(5, 99, (1, 5))
    given = {"input_ids": tokens}
    if "T5" in type(model).__name__:
        given["decoder_input_ids"] = tokens
    with torch.inference_mode():
        with regard.watch(model) as whole:
            model(**given)
        with regard.watch(model, layers=[whole.layers[1]]) as seen:
            model(**given)
    words = (
        f"has 1 of {len(whole.layers)} attention layers: '{whole.layers[0]}' was not"
    )
    with pytest.warns(UserWarning, match=words) as caught:
        (found,) = seen.attentions
    assert caught[0].filename == __file__
    assert torch.equal(found, whole.attentions[1])


def test_what_a_stranger_wrote_about_padding_is_no_error(seen):
    for note in ("x", [["a"]], [[[1], [2, 3]]], [{}], [None], [[1, 1, 1, 1, 1, 1, 7]]):
        recording = seen.recording
        odd = Recording(
            model="",
            records=recording.records,
            sequences=(0,) * 4,
            notes={"valid": note},
        )
        assert Seen(odd).attentions[0].shape[-2:] in ((6, 6), (7, 7))
