"""What the exercises teach is what the library computes."""

import numpy as np
import pytest

import regard
from regard.definition.heads import split_heads
from regard.definition.position import HALVES, rotary, sinusoidal
from regard.learn.exercise import read_exercise
from regard.masks.patterns import causal, same, window
from regard.nn.tasks import Copy
from regard.plain.config import Config
from regard.plain.decoder import Decoder
from regard.plain.feedforward import feed_forward
from regard.plain.layer import block
from regard.plain.linear import Linear
from regard.plain.multihead import multi_head
from regard.plain.norm import layer_norm, rms_norm, softmax
from regard.plain.sample import Sampling


def attend_heads(x, wq, wk, wv, wo, heads):
    qkv = Linear(np.concatenate([wq, wk, wv]))
    return multi_head(x, qkv, Linear(wo), heads=heads)


def share(logits, temperature, top_k):
    if not temperature:
        return np.eye(logits.size)[Sampling().pick(logits, [], None)]
    return softmax(Sampling(temperature=temperature, top_k=top_k).filter(logits))


def feed(x, up, up_bias, down, down_bias):
    return feed_forward(x, Linear(up, up_bias), Linear(down, down_bias), "gelu")


def add_key(top, total, mix, score, value):
    """Merge the keys so far with one more, as parts."""
    before = (mix / total, top + np.log(total)) if total else (mix, -np.inf)
    parts = [(out[None], np.array([lse])) for out, lse in (before, (value, score))]
    out, lse = regard.merge(*parts)
    new = max(top, score)
    total = 0.0 if new == -np.inf else np.exp(lse[0] - new)
    return new, total, out[0] * total


def run_block(x, qkv, out, up, down):
    config = describe(x.shape[1], hidden=len(up), activation="relu", position="none")
    weights = name_layer("", qkv, out, up, down)
    return block(x, weights, config, mask=causal())


def run_decoder(tokens, embed, positions, layers):
    D = embed.shape[1]
    names = {"embed.weight": embed, "positions.weight": positions}
    names["norm.weight"] = np.ones(D)
    for i, layer in enumerate(layers):  # without feed-forward: its matrices are 0
        cut = layer[: 3 * D], layer[3 * D :], np.zeros((2, D)), np.zeros((D, 2))
        names |= name_layer(f"blocks.{i}.", *cut)
    sizes = {"vocabulary": len(embed), "context": len(positions), "hidden": 2}
    return Decoder(describe(D, layers=len(layers), **sizes), names)(tokens)


def describe(width, **sizes):
    sizes = {"vocabulary": 3, "context": 9, "layers": 1, **sizes}
    return Config(width=width, heads=1, bias=False, **sizes)


def name_layer(prefix, qkv, out, up, down):
    names = {
        "attention.qkv": qkv,
        "attention.out": out,
        "feed.up": up,
        "feed.down": down,
    }
    names |= dict.fromkeys(("attention_norm", "feed_norm"), np.ones(len(out)))
    return {f"{prefix}{name}.weight": x for name, x in names.items()}


def see(q, k, documents, left, first):
    real = regard.where(lambda b, h, q, k: documents[k] != -1)
    sinks = regard.where(lambda b, h, q, k: k < first)
    mask = causal() & ((window(left) & same(documents)) | sinks) & real
    flat = [np.zeros((n, 1)) for n in (q.size, k.size, k.size)]
    start = int(q[0, 0])
    return regard.attention(*flat, mask, q_start=start, see=("weights",)).weights > 0


SAME = {
    "attend": lambda q, k, v: regard.attention(q, k, v).out,
    "heads_split": split_heads,
    "multi_head": attend_heads,
    "fused_qkv": lambda x, w, h: tuple(
        split_heads(y, h) for y in np.split(x @ w.T, 3, 1)
    ),
    "cross_attention": lambda x, y, wq, wk, wv: (
        regard.attention(x @ wq.T, y @ wk.T, y @ wv.T).out
    ),
    "sinusoidal": sinusoidal,
    "rotary": lambda x, positions: rotary(x, positions, pairing=HALVES),
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "feed_forward": feed,
    "block": run_block,
    "decoder_logits": run_decoder,
    "sampling": share,
    "online_softmax": add_key,
    "merge_parts": lambda a, lse_a, b, lse_b: regard.merge((a, lse_a), (b, lse_b)),
    "grouped_heads": lambda q, k, v: regard.attention(q, k, v).out,
    "mask_algebra": see,
}


@pytest.mark.parametrize("name", SAME)
def test_an_exercise_specifies_what_the_library_computes(name):
    exercise = read_exercise(name)
    for call in exercise.draw(np.random.default_rng(7)):
        taught, ours = exercise.spec(*call), SAME[name](*call)
        if not isinstance(taught, tuple):
            taught, ours = (taught,), (ours,)
        for x, y in zip(taught, ours, strict=True):
            np.testing.assert_allclose(y, x, rtol=1e-9, atol=1e-12)


def test_the_copy_task_is_the_one_that_models_are_trained_on():
    tokens, answers = (x.numpy() for x in Copy(5).batch(6, seed=0, step=0))
    inputs, targets, counted = read_exercise("copy_task").spec(tokens[:, :5], 10)
    np.testing.assert_array_equal(inputs, tokens[:, :-1])
    np.testing.assert_array_equal(targets, tokens[:, 1:])
    np.testing.assert_array_equal(counted, answers[:, 1:])
