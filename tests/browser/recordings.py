"""What is shown in the browser, each with its dense weights in float64.

    seen, weights = RECORDINGS["causal"]()
    weights[sequence, layer]      (heads, queries, keys); NaN: nobody may look there

The made ones are computed here by the formula alone; the models are tiny, and their
weights are what transformers says with eager attention.
"""

import math
from functools import cache

import numpy as np
import torch
from tiny_models import build_whisper
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    T5Config,
    T5Model,
    ViTConfig,
    ViTModel,
)

import regard
from regard.masks.patterns import causal
from regard.recording.record import Record, Recording
from regard.seen import Seen

ALERT = "window.hacked=1"
HOSTILE = (
    f"</script><script>{ALERT}</script>",
    f"<img src=x onerror={ALERT}>",
    f'"><svg onload={ALERT}>',
    "\"'`${alert(1)}\\",
    "&lt;b&gt;&amp;",
    "\u202eright to left\u2066",
    "\u05e9\u05dc\u05d5\u05dd",
    "\u200b\u200d\ufeff",
    "\ud83d",  # halves of an emoji
    "\ude00",
    "\ufffd\ufffd",  # bytes that are no UTF-8, as decoders show them
    "\udcff\udc80",  # and as Python keeps them
    "\u0301\u0489",  # marks without a letter
    "\x00\x1b[2J\u2028\u2029",
    "\n\t ",
    "W" * 10_000,
    "\u05d0" * 10_000,
    "",
)
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "the",
    "mat",
    "because",
    "it",
    "was",
    "warm",
    "and",
    "dry",
]


def make_texts(n):
    return tuple(f" {WORDS[i % len(WORDS)]}" for i in range(n))


def make_record(layer, n, heads, *, mask=None, seed=0):
    """Return a record of (queries, keys) = n, and its weights."""
    rng = np.random.default_rng([seed, layer])
    q, k = (rng.normal(size=(heads, x, 8)) * 1.3 for x in n)
    if heads > 1:  # the second head has a sink
        q[1, :, 0] += 6
        k[1, 0, 0] += 6
    allowed = np.tri(*n, dtype=bool) if mask is not None else np.ones(n, bool)
    logits = np.where(allowed, np.einsum("hid,hjd->hij", q, k) / math.sqrt(8), -np.inf)
    top = logits.max(-1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    arrays = {"q": q, "k": k, "lse": lse}
    record = Record(
        name=f"model.layers.{layer}.self_attn",
        scale=1 / math.sqrt(8),
        q_positions=torch.arange(n[0]),
        k_positions=torch.arange(n[1]),
        mask=mask,
        **{name: torch.from_numpy(x) for name, x in arrays.items()},
    )
    return record, np.where(allowed, np.exp(logits - lse[..., None]), np.nan)


def make_recording(n, *, layers=2, heads=3, mask=None, texts=None, seed=0):
    """Return what is seen, and its weights by (sequence, layer)."""
    made = [make_record(x, n, heads, mask=mask, seed=seed) for x in range(layers)]
    texts = make_texts(max(n)) if texts is None else texts
    recording = Recording(
        model="Tiny",
        records=tuple(record for record, _ in made),
        sequences=(0,) * layers,
        tokens=(tuple(range(max(n))),),
        texts=(tuple(texts),),
    )
    weights = {(0, x): dense for x, (_, dense) in enumerate(made)}
    return Seen(recording), weights


def make_lost():
    """Return a head, of two, with NaN in a key: the rows from 25 on have no weights."""
    seen, weights = make_recording((40, 40), layers=1, heads=2, mask=causal(), seed=4)
    seen.recording.records[0].k[0, 25, 0] = math.nan
    return seen, weights


def make_encoder():
    """Return a tiny BERT over two sentences, the second one padded."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        initializer_range=0.4,
    )
    model = BertModel(config).eval()
    tokens = torch.randint(5, 99, (2, 40))
    valid = torch.ones_like(tokens)
    valid[1, 29:] = 0
    with torch.inference_mode():
        with regard.watch(model) as seen:
            model(input_ids=tokens, attention_mask=valid)
        eager = as_eager(BertModel, model)
        found = eager(
            input_ids=tokens, attention_mask=valid, output_attentions=True
        ).attentions
    weights = {
        (sequence, layer): dense[sequence, :, :n, :n].double().numpy()
        for layer, dense in enumerate(found)
        for sequence, n in enumerate((40, 29))
    }
    return seen.label(lambda ids: f" w{ids[0]}"), weights


def make_pair():
    """Return a tiny T5: its encoder, its decoder, and what looks across."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4
    )
    model = T5Model(config).eval()
    for name, x in model.named_parameters():
        if name.endswith(("q.weight", "k.weight")):
            torch.nn.init.normal_(x, std=0.35)
    tokens, answer = torch.randint(5, 99, (2, 70)), torch.randint(5, 99, (2, 23))
    valid = torch.ones_like(tokens)
    valid[1, 50:] = 0
    inputs = {
        "input_ids": tokens,
        "attention_mask": valid,
        "decoder_input_ids": answer,
    }
    with torch.inference_mode():
        with regard.watch(model) as seen:
            model(**inputs)
        done = as_eager(T5Model, model)(**inputs, output_attentions=True)
    maps = (done.encoder_attentions, done.decoder_attentions, done.cross_attentions)
    weights = {}
    for layer, ((found,), _) in enumerate(zip(maps, seen.layers, strict=True)):
        for sequence in (0, 1):
            dense = found[sequence].double().numpy()
            if sequence == 1 and layer == 0:  # padding is gone
                dense = dense[:, :50, :50]
            if layer == 1:
                dense = np.where(np.tri(23, dtype=bool), dense, np.nan)
            if sequence == 1 and layer == 2:  # and here it is masked
                dense = np.where(np.arange(70) < 50, dense, np.nan)
            weights[sequence, layer] = dense
    return seen, weights


def make_vision():
    """Return a tiny ViT on a picture of 4 × 4 patches, with the picture."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
        initializer_range=0.5,
    )
    model = ViTModel(config).eval()
    pixels = torch.rand(1, 3, 32, 32)
    with torch.inference_mode():
        with regard.watch(model) as seen:
            model(pixel_values=pixels)
        eager = as_eager(ViTModel, model)
        (found,) = eager(pixel_values=pixels, output_attentions=True).attentions
    return seen.picture(pixels[0]), {(0, 0): found[0].double().numpy()}


GRIDS = ((2, 4), (3, 2))  # patches of the two pictures of "images", rows first


def make_images():
    """Return a tiny Qwen2-VL on a text with two pictures, which merges 2 × 2 patches."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = Qwen2VLConfig(
        text_config=sizes
        | {"vocab_size": 100, "intermediate_size": 48, "num_key_value_heads": 2}
        | {"rope_parameters": rope, "initializer_range": 0.35}
        | {"bos_token_id": 1, "eos_token_id": 2},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4}
        | {"mlp_ratio": 2, "patch_size": 4},
        image_token_id=93,
        vision_start_token_id=91,
        vision_end_token_id=92,
    )
    model = Qwen2VLForConditionalGeneration(config).eval()
    ids = [5, 6, 7]
    for rows, columns in GRIDS:
        ids += [91, *[93] * (rows * columns), 92, 8, 9, 10, 11]
    ids += range(20, 20 + len(HOSTILE))
    tokens = torch.tensor([ids])
    grid = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in GRIDS])
    inputs = {
        "input_ids": tokens,
        "pixel_values": torch.rand(int(grid.prod(-1).sum()), 96),
        "image_grid_thw": grid,
        "mm_token_type_ids": (tokens == 93).int(),
    }
    words = WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    hostile = dict(enumerate(HOSTILE, start=20)) | {93: "<|image_pad|>"}
    with torch.inference_mode():
        seen = regard.read(inputs, model=(model, tokenizer))
        seen = seen.label(lambda ids: hostile.get(ids[0], f" w{ids[0]}"))
        eager = as_eager(Qwen2VLForConditionalGeneration, model)
        found = eager(**inputs, output_attentions=True).attentions
    mask = np.tri(len(ids), dtype=bool)
    return seen, {
        (0, 2 + layer): np.where(mask, dense[0].double().numpy(), np.nan)
        for layer, dense in enumerate(found)
    }


def make_sound():
    """Return a tiny Whisper on noise of 1 s, of which 0.62 s are shown, and its words."""
    torch.manual_seed(0)
    network, _ = build_whisper()
    network = network.eval()
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.25)
    words = (" so", *HOSTILE[:15])
    answer = torch.arange(1, 17)[None]
    inputs = {"input_features": torch.randn(1, 8, 100), "decoder_input_ids": answer}
    with torch.inference_mode():
        with regard.watch(network) as seen:
            network(**inputs)
        network.set_attn_implementation("eager")
        found = network(**inputs, output_attentions=True)
    seen = seen.sound(inputs["input_features"][0], 1, until=0.62, words=words)
    pairs = zip(found.decoder_attentions, found.cross_attentions, strict=True)
    maps = [*found.encoder_attentions, *(x for pair in pairs for x in pair)]
    return seen, {(0, i): x[0].double().numpy() for i, x in enumerate(maps)}


def as_eager(kind, model):
    """Return the same model with attention that tells its weights."""
    eager = kind._from_config(model.config, attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    return eager


MAKERS = {
    "lost": make_lost,
    "causal": lambda: make_recording((257, 257), mask=causal()),
    "long": lambda: make_recording((600, 600), heads=2, mask=causal(), seed=1),
    "one": lambda: make_recording((1, 1), mask=causal(), texts=("only",)),
    "five": lambda: make_recording((5, 5), layers=1, heads=1, mask=causal()),
    "pieces": lambda: make_recording((5, 5), layers=1, heads=1, texts=(*"abcde",)),
    "across": lambda: make_recording((220, 440), layers=1),
    "tall": lambda: make_recording((300, 9), layers=1),
    "hostile": lambda: make_recording(
        (len(HOSTILE), len(HOSTILE)), layers=1, heads=2, texts=HOSTILE
    ),
    "encoder": make_encoder,
    "pair": make_pair,
    "vision": make_vision,
    "images": make_images,
    "sound": make_sound,
}
RECORDINGS = {name: cache(make) for name, make in MAKERS.items()}
