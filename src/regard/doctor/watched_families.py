"""Check the lens on ten small model families: the same bits, and the right weights.

    bits       outputs watched == outputs unwatched, bit by bit, and generations too
    weights    those recorded == those that the eager attention of a copy returns

The models have random weights, far enough from zero that attention is not uniform. If a
model does not repeat its own bits on a device, the device is not deterministic, and the
result is "not run".

Next: watched_generations.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from regard.doctor.examined import Trial, judge_error, write_error
from regard.seen import Seen, watch

SAME = "watched models compute the same bits"
RIGHT = "recorded weights are those of eager attention"
WEIGHT_ERROR = 1e-5
HEADS, WIDTH, VOCABULARY, LENGTH, NEW = 4, 64, 96, 40, 6
NO_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
TEXT = {**NO_TOKENS, "vocab_size": VOCABULARY, "max_position_embeddings": 128}
LAYERS = {
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
}
SHARED = {**TEXT, **LAYERS, "num_key_value_heads": 2}
WINDOWED = {**SHARED, "sliding_window": 12}
GEMMA = {**WINDOWED, "head_dim": 16}
# transformers 4 runs it with SDPA, which leaves out its softcap
CAPPED = {**GEMMA, "attn_implementation": "eager"}
GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 128}
T5 = {"d_model": WIDTH, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": HEADS}
WHISPER = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "num_mel_bins": 8,
    "max_source_positions": LENGTH,
    "max_target_positions": 128,
}
START = {**NO_TOKENS, "vocab_size": VOCABULARY, "decoder_start_token_id": 1}


@dataclass(frozen=True)
class SmallFamily:
    """A class of transformers, small, with its inputs."""

    name: str
    options: dict[str, Any] = field(repr=False)
    draw_inputs: Callable[[], dict[str, Tensor]]
    generates: bool = False

    def build(self) -> nn.Module:
        """Return the model with random weights, on the CPU."""
        import transformers  # noqa: PLC0415 (large, and may be missing)

        torch.manual_seed(0)
        made = getattr(transformers, self.name)
        model = made(made.config_class(**self.options)).eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape), alpha=0.1)
        return model


def draw_text() -> dict[str, Tensor]:
    """Return two sequences of tokens, the second one padded on the left."""
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH))
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    tokens[1, :5] = mask[1, :5] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def draw_answer() -> dict[str, Tensor]:
    """Return inputs of an encoder, and of its decoder."""
    answer = torch.randint(3, VOCABULARY, (2, 9))
    return {**draw_text(), "decoder_input_ids": answer}


def draw_image() -> dict[str, Tensor]:
    """Return two images of 7 x 7 patches."""
    return {"pixel_values": torch.randn(2, 3, 28, 28)}


def draw_sound() -> dict[str, Tensor]:
    """Return two spectrograms, and the tokens of a decoder."""
    answer = torch.randint(3, VOCABULARY, (2, 9))
    sound = torch.randn(2, 8, 2 * LENGTH)
    return {"input_features": sound, "decoder_input_ids": answer}


PICTURE = {**LAYERS, "image_size": 28, "patch_size": 4}
FAMILIES = (
    SmallFamily("GPT2LMHeadModel", {**TEXT, **GPT2}, draw_text, generates=True),
    SmallFamily("LlamaForCausalLM", SHARED, draw_text, generates=True),
    SmallFamily("Qwen3ForCausalLM", SHARED, draw_text, generates=True),
    SmallFamily("MistralForCausalLM", WINDOWED, draw_text, generates=True),
    SmallFamily("Gemma2ForCausalLM", CAPPED, draw_text, generates=True),
    SmallFamily("Gemma3ForCausalLM", GEMMA, draw_text, generates=True),
    SmallFamily("BertModel", {**TEXT, **LAYERS}, draw_text),
    SmallFamily("T5ForConditionalGeneration", {**START, **T5}, draw_answer),
    SmallFamily("ViTModel", PICTURE, draw_image),
    SmallFamily("WhisperForConditionalGeneration", {**START, **WHISPER}, draw_sound),
)


def check_families(device: torch.device) -> Iterator[Trial]:
    """Watch every family on a device."""
    yield from try_families(SAME, check_family, device)


def try_families(
    promise: str,
    check: Callable[[SmallFamily, torch.device], Iterator[Trial]],
    device: torch.device,
) -> Iterator[Trial]:
    """Yield the trials of every family; an exception is the end of one family."""
    for family in FAMILIES:
        trial = Trial(promise, family.name, str(device))
        if find_spec("transformers") is None:
            reason = 'transformers is not installed: pip install "regard[hf]"'
            yield trial.end("not run", says=reason)
            continue
        try:
            yield from check(family, device)
        except Exception as error:  # noqa: BLE001 (an unknown device)
            yield trial.end("broken", says=write_error(error))


def check_family(family: SmallFamily, device: torch.device) -> Iterator[Trial]:
    """Yield whether outputs have the same bits, and whether weights are right."""
    model = family.build().to(device)
    inputs = {name: x.to(device) for name, x in family.draw_inputs().items()}
    trial = Trial(SAME, family.name, str(device))
    plain, again = run_family(family, model, inputs), run_family(family, model, inputs)
    with watch(model):
        watched = run_family(family, model, inputs)
    what = "outputs and generation" if family.generates else "outputs"
    if not have_same_bits(plain, again):
        reason = "The model does not repeat its own bits on this device."
        yield trial.end("not run", says=reason)
    elif have_same_bits(plain, watched):
        yield trial.end("holds", f"{what} identical")
    else:
        yield trial.end(
            "broken", f"{what} differ", says=describe_change(plain, watched)
        )
    with watch(model) as seen, torch.no_grad():
        model(**inputs)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        right = list_eager_weights(eager(**inputs, output_attentions=True))
    yield check_weights(Trial(RIGHT, family.name, str(device)), seen, right)


def run_family(
    family: SmallFamily, model: nn.Module, inputs: dict[str, Tensor]
) -> list[Tensor]:
    """Return the outputs of a forward pass, and the logits of a generation."""
    with torch.no_grad():
        outputs = flatten_outputs(model(**inputs).to_tuple())
    return outputs + run_generation(model, inputs) if family.generates else outputs


def run_generation(model: Any, inputs: dict[str, Tensor], **cache: str) -> list[Tensor]:
    """Return the sequences that a model generates, and the logits of each step."""
    with torch.no_grad():
        made = model.generate(
            **inputs,
            **cache,
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return [made.sequences, *made.logits]


def flatten_outputs(found: Any) -> list[Tensor]:
    """Return the tensors in nested tuples."""
    if isinstance(found, Tensor):
        return [found]
    return [
        x for part in found if isinstance(found, tuple) for x in flatten_outputs(part)
    ]


def have_same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    """Return whether all tensors are equal; NaN is equal to NaN."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def describe_change(one: list[Tensor], other: list[Tensor]) -> str:
    """Return by how much outputs differ."""
    pairs = zip(one, other, strict=True)
    apart = max(float((a - b).abs().max()) for a, b in pairs)
    return f"Outputs differ by up to {apart:.1e} while the model is watched."


def check_weights(trial: Trial, seen: Seen, right: list[Tensor]) -> Trial:
    """Compare every recorded weight with those of eager attention, layer by layer."""
    recording = seen.recording
    if len(recording.layers) != len(right):
        says = f"{len(recording.layers)} of {len(right)} layers were recorded."
        return trial.end("broken", says=says)
    error = 0.0
    for record, sequence in zip(recording.records, recording.sequences, strict=True):
        _, n_q, n_k = record.shape  # without the padding, which is on the left
        expected = right[recording.layers.index(record.name)][sequence]
        apart = record.weights() - expected[:, -n_q:, -n_k:]
        error = max(error, float(apart.abs().nan_to_num(torch.inf).max()))
    return judge_error(trial, error, WEIGHT_ERROR)


def list_eager_weights(outputs: Any) -> list[Tensor]:
    """Return the weights of every attention layer, in the order in which they ran."""
    if getattr(outputs, "cross_attentions", None):
        pairs = zip(outputs.decoder_attentions, outputs.cross_attentions, strict=True)
        return [*outputs.encoder_attentions, *(x for pair in pairs for x in pair)]
    return list(outputs.attentions)
