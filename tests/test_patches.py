"""The weights of one query over a picture: values, text twin, figure."""

import base64
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import ViTConfig, ViTModel

import regard
from regard.errors import OptionError, ShapeError
from regard.recording.record import Record
from regard.show.map_source import MapSource, Spot
from regard.show.patch_overlay import (
    draw_patches,
    plot_patches,
    read_patches,
)
from regard.show.vision_input import find_pictures, note_picture, read_picture

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 32, "image_size": 32, "patch_size": 8}


def make_record(n_keys, heads=2, mask=None, name="layer", seed=0):
    """Return a record and its weights by definition."""
    rng = np.random.default_rng(seed)
    q, k = (torch.from_numpy(x) for x in rng.normal(size=(2, heads, n_keys, 4)) * 1.5)
    scores = q @ k.mT
    if mask is not None:
        scores = scores.masked_fill(~torch.from_numpy(mask), -torch.inf)
        mask = torch.from_numpy(mask)[None]
    at = torch.arange(n_keys)
    record = Record(
        name=name, q=q, k=k, lse=scores.logsumexp(-1), scale=1.0,
        q_positions=at, k_positions=at, mask=mask,
    )  # fmt: skip
    return record, scores.softmax(-1).numpy()


@pytest.fixture(scope="module")
def vit():
    """Run a small vision transformer; return what was seen, its weights, its pixels."""
    torch.manual_seed(0)
    config = ViTConfig(**SIZES, initializer_range=0.3)
    model = ViTModel(config, add_pooling_layer=False).eval().double()
    pixels = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    with regard.watch(model) as seen, torch.inference_mode():
        model(pixels)
    model.set_attn_implementation("eager")  # whose softmax is in float32
    with torch.inference_mode():
        weights = model(pixels, output_attentions=True).attentions
    return seen, weights, pixels


@pytest.mark.parametrize("sequence", [0, 1])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("query", [0, (0, 0), (1, 2), (3, 3)])
def test_the_grids_of_a_vision_model_are_its_own_weights(vit, sequence, layer, query):
    seen, weights, _ = vit
    found = read_patches(seen.layer(layer, sequence=sequence), query)
    token = query if query == 0 else 1 + 4 * query[0] + query[1]
    assert [x.head for x in found] == [0, 1]
    for x in found:
        row = weights[layer][sequence, x.head, token].numpy()
        for i in range(4):
            for j in range(4):
                assert x.weights[i, j] == pytest.approx(row[1 + 4 * i + j], abs=1e-6)
        assert x.special == pytest.approx(row[:1], abs=1e-6)
        assert x.weights.sum() + x.special.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("n_keys", "grid", "shape", "special"),
    [
        (9, None, (3, 3), 0),
        (11, None, (3, 3), 2),  # a distilled model
        (21, None, (4, 4), 5),  # a class token and four registers
        (7, (2, 3), (2, 3), 1),
        (14, (3, 4), (3, 4), 2),
        (25, (4, 4), (4, 4), 9),
    ],
)
def test_special_tokens_are_the_keys_before_the_grid(n_keys, grid, shape, special):
    record, weights = make_record(n_keys)
    (found,) = read_patches(record, (1, 2), grid=grid, heads=[1])
    row = weights[1, special + shape[1] + 2]
    assert found.weights.shape == shape
    np.testing.assert_allclose(found.weights.ravel(), row[special:], atol=1e-12)
    np.testing.assert_allclose(found.special, row[:special], atol=1e-12)
    if special:
        (last,) = read_patches(record, special - 1, grid=grid, heads=[0])
        expected = weights[0, special - 1, special:]
        np.testing.assert_allclose(last.weights.ravel(), expected, atol=1e-12)


def test_queries_are_found_by_their_position():
    record, weights = make_record(10)
    kept = torch.tensor([7, 2])  # only two queries were kept, in this order
    some = Record(
        name="x", q=record.q[:, kept], k=record.k, lse=record.lse[:, kept], scale=1.0,
        q_positions=kept, k_positions=record.k_positions,
    )  # fmt: skip
    found = read_patches(some, (0, 1))[0]
    np.testing.assert_allclose(found.weights.ravel(), weights[0, 2, 1:], atol=1e-12)
    with pytest.raises(OptionError, match="kept no query at 3"):
        read_patches(some, (0, 2))


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        ({"query": (3, 0)}, OptionError, "one of 3 × 3 patches, or the number of one of 1 special"),
        ({"query": (0, -1)}, OptionError, "expected .row, column."),
        ({"query": 1}, OptionError, "one of 1 special tokens"),
        ({"query": -1}, OptionError, "one of 1 special tokens"),
        ({"grid": (4, 3)}, ShapeError, "no more patches than keys"),
        ({"grid": (0, 3)}, ShapeError, "at least one patch"),
        ({"heads": [2]}, OptionError, "expected some of 0 to 1"),
        ({"heads": []}, OptionError, "expected some of 0 to 1"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused(ask, error, words):
    with pytest.raises(error, match=words):
        read_patches(make_record(10)[0], **ask)


def test_a_grid_that_cannot_be_found_is_asked_for():
    record, _ = make_record(24 * 2 + 1 - 3)  # 46 keys: 36 and 10 are too many
    with pytest.raises(ShapeError, match=r"write grid=\(rows, columns\)"):
        read_patches(record)


# text

PATCH = """\
layers.1.attention
query: patch (1, 2) of 3 × 3, after 1 special token
  head 0  head 1
  0 1 2   0 1 2
0 ······  ····▓▓
1 ██····  ··▓▓··
2 ······  ······
· less   ░ 0.15   ▒ 0.3   ▓ 0.45   █ 0.6 or more   blank: masked
head 0: 0.08 on 1 special token, 0.01 on itself, most on (1, 0), 0.75
head 1: 0.00 on 1 special token, 0.00 on itself, most on (0, 2), 0.51"""
CLASS = """\
layers.1.attention
query: class token, before 3 × 3 patches
  head 1
  0 1 2
0 ····██
1 ······
2 ██····
· less   ░ 0.1   ▒ 0.2   ▓ 0.3   █ 0.4 or more   blank: masked
head 1: 0.00 on 1 special token, most on (0, 2), 0.50"""


def test_the_text_of_a_patch_and_of_a_class_token_is_exact():
    record, weights = make_record(10, name="layers.1.attention")
    drawn = draw_patches(record, (1, 2), width=40)
    assert drawn == PATCH
    row = weights[1, 1 + 5]
    told = drawn.splitlines()[-1]
    assert told.startswith(f"head 1: {row[0]:.2f} on 1 special token, {row[6]:.2f} on")
    i, j = divmod(int(row[1:].argmax()), 3)
    assert told.endswith(f"most on ({i}, {j}), {row[1:].max():.2f}")
    assert draw_patches(record, 0, heads=[1]) == CLASS
    assert "\x1b[48;2;" in draw_patches(record, 0, color="light")


def test_a_large_grid_is_pooled_and_says_so():
    record, weights = make_record(1 + 60 * 60, heads=1)
    drawn = draw_patches(record, width=40).splitlines()
    assert drawn[-2].startswith("each pixel: the largest of up to")
    down, across = (int(x) for x in drawn[-2].split() if x.isdigit())
    grid = weights[0, 0, 1:].reshape(60, 60)
    top = grid[:down, :across].max() / grid.max()
    assert drawn[4].split()[1][0] == "·░▒▓█"[min(4, int(top * 5))]


def test_a_name_cannot_steer_a_terminal():
    drawn = draw_patches(make_record(10, name="\x1b[2J\u202eA")[0])
    assert drawn.splitlines()[0] == "[2JA"


# figures


def test_the_figure_has_the_weights_the_picture_and_a_frame(vit, tmp_path):
    seen, weights, pixels = vit
    drawn = plot_patches(seen.layer(1), (1, 2), picture=pixels[0])
    picture, *maps, bar = drawn.axes
    np.testing.assert_array_equal(picture.images[0].get_array(), read_picture(pixels[0]))  # fmt: skip
    top = max(float(weights[1][0, h, 7, 1:].max()) for h in (0, 1))
    for h, axes in enumerate(maps):
        grid = weights[1][0, h, 7, 1:].reshape(4, 4).numpy()
        np.testing.assert_allclose(axes.images[0].get_array(), grid, atol=1e-6)
        assert axes.images[0].norm.vmax == pytest.approx(top)
        assert axes.images[0].get_extent() == axes.images[1].get_extent()
        share = float(weights[1][0, h, 7, 0])
        expected = [f"head {h}", f"{share:.2f} on 1 special token"]
        assert axes.get_title().splitlines() == expected
    for axes in (picture, *maps):
        corners = axes.patches[-1].get_xy()[:4]
        assert corners.min(0).tolist() == [1.5, 0.5]  # column, row
        assert corners.max(0).tolist() == [2.5, 1.5]
    above = [
        "layers.1.attention",
        "query: patch (1, 2) of 4 × 4, after 1 special token",
    ]
    assert drawn.get_suptitle().splitlines() == above
    assert bar.get_ylabel() == "weight"
    for name in ("a.png", "a.svg", "a.pdf"):
        drawn.savefig(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 5_000


def test_without_a_picture_numbers_are_written_and_a_class_token_has_no_frame(tmp_path):
    record, weights = make_record(10)
    drawn = plot_patches(record, heads=[1], dark=True)
    axes, _ = drawn.axes
    numbers = {x.get_position(): x.get_text() for x in axes.texts}
    assert numbers[2, 1] == f"{weights[1, 0, 6]:.2f}"  # column 2, row 1
    assert not axes.patches
    assert drawn.get_suptitle().endswith("query: class token, before 3 × 3 patches")
    drawn.savefig(tmp_path / "a.png")


def test_what_is_masked_is_hatched_over_a_picture_too():
    mask = np.ones((10, 10), bool)
    mask[:, 4] = False
    record, weights = make_record(10, mask=mask)
    axes = plot_patches(record, picture=np.zeros((6, 6)), heads=[0]).axes[1]
    image, over = (x.get_array() for x in axes.images)
    assert np.argwhere(image.mask).tolist() == [[1, 0]]
    assert weights[0, 0, 4] == 0
    alpha = over[..., 3]
    assert (alpha[2:4, :2] == 0).all()  # nothing over the hatching
    assert (np.delete(alpha.ravel(), [12, 13, 18, 19]) > 0).any()


def test_the_picture_is_bare_without_weight_and_gone_at_the_largest():
    record, _ = make_record(10)
    (found,) = read_patches(record, heads=[0])
    axes = plot_patches(record, heads=[0], picture=np.full((7, 9), 0.5)).axes[1]
    alpha = axes.images[1].get_array()[..., 3]
    assert alpha.shape == (7, 9)
    places = found.weights / found.weights.max()
    for y in range(7):
        for x in range(9):
            i, j = y * 3 // 7, x * 3 // 9
            assert alpha[y, x] == pytest.approx(0.75 * (1 - places[i, j]) ** 2)
    assert alpha.min() == 0


def test_a_picture_may_come_in_any_common_form():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (4, 5, 3), np.uint8)
    expected = x / 255
    for form in (
        x,
        x / 255,
        np.moveaxis(x, -1, 0),
        torch.from_numpy(x).permute(2, 0, 1),
    ):
        np.testing.assert_allclose(read_picture(form), expected, atol=1e-12)
    grey = read_picture(x[..., 0])
    np.testing.assert_allclose(grey, expected[..., :1].repeat(3, -1), atol=1e-12)
    normal = read_picture(x / 255 * 4 - 2)  # as a model gets it
    assert (normal.min(), normal.max()) == (0, 1)
    assert np.corrcoef(normal.ravel(), expected.ravel())[0, 1] == pytest.approx(1)
    assert (read_picture(np.full((2, 2), 7.0)) == 0).all()
    with pytest.raises(ShapeError, match=r"write pixels\[0\]"):
        read_picture(x[None])
    with pytest.raises(ShapeError, match=r"\(4, 5, 2\), expected"):
        read_picture(x[..., :2])


def test_a_recording_keeps_the_picture_and_the_names_of_its_patches(vit, tmp_path):
    seen, _, pixels = vit
    seen.picture(pixels[1], sequence=1).save(tmp_path / "a.regard")
    again = regard.open(tmp_path / "a.regard")
    (note,) = find_pictures(again.recording).values()
    assert (note["rows"], note["columns"], note["special"]) == (4, 4, 1)
    image = np.frombuffer(base64.b64decode(note["rgb"]), np.uint8)
    expected = np.rint(read_picture(pixels[1]) * 255).reshape(-1)
    np.testing.assert_array_equal(image, expected)
    assert again.recording.texts[1][:3] == ("special 0", "(0,0)", "(0,1)")
    assert again.recording.texts[1][16] == "(3,3)"
    source = MapSource(again.recording)
    row = source.row(Spot(1, 0, 1), 5)["weights"]
    np.testing.assert_allclose(row, seen.layer(0, sequence=1).weights()[1, 5], 1e-5)
    assert "weights" not in source.row(Spot(0, 0, 1), 5)


def test_a_large_picture_is_made_smaller():
    record, _ = make_record(17)
    note = note_picture(record, np.zeros((600, 300, 3)), None)
    assert (note["height"], note["width"]) == (200, 100)


def test_a_picture_in_a_file_may_say_anything(vit):
    seen, _, pixels = vit
    good = seen.picture(pixels[0]).recording
    (note,) = good.notes["pictures"].values()
    for change in (
        {"rows": 5},
        {"special": -1},
        {"rows": -4, "columns": -4},
        {"height": 10**9},
        {"rgb": "AAAA"},
        {"rgb": None},
        {"width": "32"},
    ):
        notes = {"pictures": {"0": note | change}}
        assert find_pictures(replace(good, notes=notes)) == {}, change
    for pictures in (None, [], {"9": note}, {"0": 3}):
        assert find_pictures(replace(good, notes={"pictures": pictures})) == {}
    assert find_pictures(good) == {"0": note}
