"""Which token is which patch: pixels are changed, and one token must change with them."""

import copy
import dataclasses
from functools import partial

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from families import GROUPED, IMAGE, quiet, sized

import regard
from regard.errors import OptionError, ShapeError
from regard.models.image_tokens import find_patches
from regard.show.map_source import MapSource

CLIP = {**IMAGE, "model_type": "clip_vision_model"}
SIGLIP = {**IMAGE, "model_type": "siglip_vision_model", "vision_use_head": False}
LLAMA = {**GROUPED, "model_type": "llama"}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
WRITE = ("out_proj", "attn.proj", "projection_layer")  # what a vision layer writes


def settle(model):
    """Return a model in which a patch is not read by others: one pixel, one token."""
    torch.manual_seed(0)
    for name, x in model.named_parameters():
        if "mm_input_projection" in name:
            torch.nn.init.normal_(x)
        elif "vis" in name and "patch" not in name and any(w in name for w in WRITE):
            x.data.zero_()
    return model.eval()


def build(cls, options):
    with quiet():
        cls = getattr(transformers, cls)
        return settle(cls(cls.config_class(**copy.deepcopy(options))))


def number_pixels(*shape):
    """Return pixels of which each has another value, none 0."""
    torch.manual_seed(1)
    return (1 + torch.randperm(int(np.prod(shape)))).reshape(shape) / 4096


def square(cls, options, n, *, tiles=1, nested=False):
    """Return a model and inputs with `tiles` pictures of n tokens each."""
    model = build(cls, options)
    image = [7, *[model.config.image_token_id] * n]
    pixels = number_pixels(tiles, 3, 16, 16)
    ids = [5, *image * tiles, 6, 8]
    pixels = pixels[None] if nested else pixels
    return model, {"input_ids": torch.tensor([ids]), "pixel_values": pixels}


def qwen(cls, vision, grids=((1, 4, 8), (1, 6, 4))):
    """Return a model and inputs with a wide and a tall picture."""
    text = {**GROUPED, "rope_parameters": ROPE}
    options = {"text_config": text, "vision_config": vision, "image_token_id": 93}
    ids = [5]
    for _, rows, columns in grids:
        ids += [91, *[93] * (rows * columns // 4), 92]
    n = sum(rows * columns for _, rows, columns in grids)
    pixels = number_pixels(n, 3, 1, 16).expand(n, 3, 2, 16).reshape(n, 96)
    inputs = {"input_ids": torch.tensor([[*ids, 6]]), "pixel_values": pixels}
    return build(cls, options), inputs | {"image_grid_thw": torch.tensor(grids)}


DEEP = sized("depth=2 hidden_size=32 num_heads=4 patch_size=4")
WIDE = sized("out_hidden_size=32 intermediate_size=48", DEEP)
TILED = {"text_config": LLAMA, "vision_config": IMAGE, "image_token_id": 99}
INTERN = IMAGE | {"image_size": [16, 16], "patch_size": [4, 4]}
MAKERS = {
    "llava": partial(
        square,
        "LlavaForConditionalGeneration",
        {"text_config": LLAMA, "vision_config": CLIP, "image_token_index": 99}
        | {"vision_feature_layer": -1},
        16,
        tiles=2,
    ),
    "paligemma": partial(
        square,
        "PaliGemmaForConditionalGeneration",
        {"text_config": {**GROUPED, "model_type": "gemma", "head_dim": 8}}
        | {"vision_config": SIGLIP, "image_token_index": 99, "projection_dim": 32},
        16,
    ),
    "gemma3": partial(
        square,
        "Gemma3ForConditionalGeneration",
        {"text_config": {**GROUPED, "head_dim": 8}, "vision_config": SIGLIP}
        | {"image_token_id": 99, "mm_tokens_per_image": 4},
        4,
    ),
    "internvl": partial(
        square,
        "InternVLForConditionalGeneration",
        {"text_config": {**GROUPED, "model_type": "qwen2"}, "vision_config": INTERN}
        | {"image_token_id": 99},
        4,
        tiles=2,
    ),
    "idefics3": partial(
        square, "Idefics3ForConditionalGeneration", TILED, 4, tiles=2, nested=True
    ),
    "smolvlm": partial(
        square, "SmolVLMForConditionalGeneration", TILED, 4, tiles=2, nested=True
    ),
    "qwen2_vl": partial(
        qwen, "Qwen2VLForConditionalGeneration", {**DEEP, "embed_dim": 32}
    ),
    "qwen2_5_vl": partial(
        qwen, "Qwen2_5_VLForConditionalGeneration", {**WIDE, "window_size": 16}
    ),
    "qwen3_vl": partial(
        qwen,
        "Qwen3VLForConditionalGeneration",
        {**WIDE, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    ),
}


@torch.inference_mode()
def read_features(model, inputs, pixels):
    """Return the embedding of each image token, in the order of the text."""
    grids = {x: inputs[x] for x in ("image_grid_thw",) if x in inputs}
    found = model.get_image_features(pixel_values=pixels, **grids)
    found = getattr(found, "pooler_output", found)
    parts = found if isinstance(found, list | tuple) else [found]
    return torch.cat([x.reshape(-1, x.shape[-1]) for x in parts])


@pytest.mark.parametrize("name", MAKERS)
def test_a_patch_changes_its_token_and_no_other(name):
    model, inputs = MAKERS[name]()
    ids, pixels = inputs["input_ids"], inputs["pixel_values"]
    places = (ids[0] == model.config.image_token_id).nonzero().ravel().tolist()
    before = read_features(model, inputs, pixels)
    found = find_patches(model.config, inputs, ids.tolist())
    assert sorted(at for x in found for at in x.tokens) == places
    for image in found:
        _, columns = image.grid
        high, wide = (
            x // n for x, n in zip(image.pixels.shape[:2], image.grid, strict=True)
        )
        for patch, token in enumerate(image.tokens):
            i, j = divmod(patch, columns)
            part = image.pixels[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
            mine = torch.isin(pixels, torch.from_numpy(part).to(pixels.dtype))
            after = read_features(model, inputs, torch.where(mine, pixels + 1, pixels))
            changed = (after - before).abs().amax(-1) > 1e-5
            assert [places[x] for x in changed.nonzero().ravel()] == [token]


def test_tiles_with_names_are_one_picture():
    model, inputs = MAKERS["idefics3"]()
    ids = inputs["input_ids"].tolist()
    texts = [["x"] * len(ids[0])]
    texts[0][1], texts[0][6] = "<row_1_col_1>", "<row_1_col_2>"
    (joined,) = find_patches(model.config, inputs, ids, texts)
    assert joined.grid == (2, 4)
    assert joined.tokens == (2, 3, 7, 8, 4, 5, 9, 10)
    left, right = np.moveaxis(inputs["pixel_values"][0].double().numpy(), 1, -1)
    assert np.array_equal(joined.pixels, np.concatenate([left, right], 1))
    texts[0][6] = "<global-img>"
    assert [x.grid for x in find_patches(model.config, inputs, ids, texts)] == [
        (2, 2)
    ] * 2


def test_what_is_not_known_is_not_guessed():
    model, inputs = MAKERS["llava"]()
    ids = inputs["input_ids"].tolist()
    config = copy.deepcopy(model.config)
    config.vision_config.image_size = 20
    with pytest.raises(ShapeError, match=r"expected pictures of 20 × 20"):
        find_patches(config, inputs, ids)
    with pytest.raises(ShapeError, match="33 image tokens, but the pictures have 32"):
        find_patches(model.config, inputs, [[*ids[0], 99]])
    moved = [[*ids[0][:5], 8, *ids[0][5:]]]
    with pytest.raises(ShapeError, match="are interrupted by others"):
        find_patches(model.config, inputs, moved)
    other = transformers.BlipConfig()
    with pytest.raises(ShapeError, match="which token of a blip is which patch is not"):
        find_patches(other, inputs, ids)
    model, inputs = MAKERS["qwen2_vl"]()
    film = inputs | {"image_grid_thw": torch.tensor([[2, 4, 4]])}
    with pytest.raises(ShapeError, match="a video of 2 frames, expected a picture"):
        find_patches(model.config, film, inputs["input_ids"].tolist())


def watch_llava():
    model, inputs = MAKERS["llava"]()
    with regard.watch(model) as seen, torch.inference_mode():
        model(**inputs)
    return seen.label(lambda ids: f" w{ids[0]}"), inputs


def test_pictures_are_added_to_a_watched_model():
    seen, inputs = watch_llava()
    places = (inputs["input_ids"][0] == 99).nonzero().ravel()
    for pixels, tokens in zip(
        inputs["pixel_values"], places.reshape(2, 16), strict=True
    ):
        seen = seen.picture(pixels, grid=(4, 4), tokens=tokens)
    about = MapSource(seen.recording).about
    assert [x["tokens"] for x in about["images"]] == places.reshape(2, 16).tolist()
    texts = about["sequences"][0]["texts"]
    assert [texts[i] for i in (2, 8, 19)] == [
        "picture1(0,0)",
        "picture1(1,2)",
        "picture2(0,0)",
    ]
    named = {x["layer"]: x["qNamed"] and x["kNamed"] for x in about["records"]}
    kinds = [x["kind"] for x in about["layers"]]
    assert named == {i: kind != "vision" for i, kind in enumerate(kinds)}
    assert kinds.count("vision") == 2


def test_wrong_pictures_are_refused():
    seen, inputs = watch_llava()
    pixels, mine = inputs["pixel_values"][0], inputs["input_ids"][0] == 99
    with pytest.raises(OptionError, match="which of its tokens are the patches"):
        seen.picture(pixels)
    with pytest.raises(ShapeError, match=r"tokens= has 32 positions for grid=\(4, 4\)"):
        seen.picture(pixels, grid=(4, 4), tokens=mine)
    with pytest.raises(OptionError, match="expected each once, from 0 to 36"):
        seen.picture(pixels, grid=(4, 4), tokens=range(30, 46))
    good = seen.picture(pixels, grid=(4, 8), tokens=mine).recording.notes["images"][0]
    for wrong in (
        {"tokens": good["tokens"][:-1]},
        {"tokens": [1, *good["tokens"][:-1], 1]},
        {"tokens": [*good["tokens"][:-1], 99]},
        {"rgb": good["rgb"][:-4]},
        {"sequence": 1},
        {"rows": 0},
    ):
        found = dataclasses.replace(seen.recording, notes={"images": [good | wrong]})
        assert MapSource(found).about["images"] == []


def test_a_model_whose_grid_is_not_known_says_so():
    model, inputs = MAKERS["llava"]()
    model.config.vision_feature_select_strategy = "full"  # with the class token
    ids = inputs["input_ids"][:, :19]  # 16 patches and two more tokens of one picture
    ids = torch.cat([ids, torch.full((1, 1), 99)], 1)
    named = {"input_ids": ids, "pixel_values": inputs["pixel_values"][:1]}
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0")
    )
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    seen = regard.read(named, model=(model, words))
    about = MapSource(seen.recording).about
    assert about["images"] == []
    assert about["imagesMissing"] == (
        "17 image tokens, but the pictures have 16 patches."
    )
