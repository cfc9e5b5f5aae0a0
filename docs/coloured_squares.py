"""A small LLaVA that learned to name the colour of a square, for the picture of a page.

Next: pictures.py
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers import LlavaConfig, LlavaForConditionalGeneration

import regard
from regard.seen import Seen

COLOURS = {" red": (1, 0.1, 0.1), " green": (0.1, 0.8, 0.1), " blue": (0.1, 0.2, 1)}
WORDS = ("Which", " colour", " has", " the", " square", "?", " It", " is")
SIDE, PATCH, IMAGE = 6, 8, 20  # patches per side, pixels of one, the image token
STEPS = 600


def name_colours() -> Seen:
    """Return what was seen of the model on a new picture, with the picture."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4}
    sizes |= {"initializer_range": 0.1}
    text = sizes | {"vocab_size": 24, "num_hidden_layers": 2, "model_type": "llama"}
    image = sizes | {"image_size": SIDE * PATCH, "patch_size": PATCH}
    image |= {"num_hidden_layers": 1, "model_type": "clip_vision_model"}
    tokens = {"bos_token_id": 21, "eos_token_id": 22, "pad_token_id": 23}
    config = LlavaConfig(
        text_config=text | tokens | {"max_position_embeddings": 128},
        vision_config=image,
        image_token_id=IMAGE,
        vision_feature_layer=-1,
    )
    model = LlavaForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(STEPS):
        inputs, answer = draw_squares(16)
        loss = F.cross_entropy(model(**inputs).logits[:, -1], answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.manual_seed(3)
    inputs, answer = draw_squares(1)
    with regard.watch(model.eval()) as seen, torch.inference_mode():
        said = model(**inputs).logits[0, -1].argmax()
    assert said == answer
    names = dict(enumerate((*WORDS, *COLOURS))) | {IMAGE: "<image>"}
    ids = inputs["input_ids"][0]
    seen = seen.label(lambda token: names[token[0]])
    pixels = inputs["pixel_values"][0]
    return seen.picture(pixels, grid=(SIDE, SIDE), tokens=ids == IMAGE)


def draw_squares(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return pictures with a square of 2 × 2 patches, the question, and the answers."""
    answers = torch.randint(len(COLOURS), (n,))
    pixels = 0.45 + 0.1 * torch.rand(n, 3, SIDE * PATCH, SIDE * PATCH)
    for picture, answer in zip(pixels, answers.tolist(), strict=True):
        row, column = (PATCH * torch.randint(SIDE - 1, (2,))).tolist()
        colour = torch.tensor(list(COLOURS.values())[answer])[:, None, None]
        picture[:, row : row + 2 * PATCH, column : column + 2 * PATCH] = colour
    ids = [*[IMAGE] * SIDE**2, *range(len(WORDS))]
    inputs = {"input_ids": torch.tensor([ids] * n), "pixel_values": pixels}
    return inputs, answers + len(WORDS)


if __name__ == "__main__":
    print(name_colours())  # noqa: T201
