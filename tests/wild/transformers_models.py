"""Every type of model that transformers knows, from a shrunk config.

    python tests/wild/transformers_models.py            find how each type is built
    python tests/wild/transformers_models.py bert       the same for some types

A model is built from the config of its type with the largest factor (shrink.py) and the
richest inputs (inputs.py) with which it runs. That takes many attempts, so found.json
keeps what was found: factor and number of the inputs, or why there are none. What a
config needs besides is in SPECIAL.
"""

# ruff: noqa: PLC0415 (transformers takes seconds to import)

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import nn

from wild.case import Case, NotBuiltError, Run

# errors that no other factor avoids
HOPELESS = re.compile(r"no inputs|missing \d required|NoneType|has no attribute")
FOUND = Path(__file__).with_name("found.json")
LARGEST = 40_000_000  # parameters
STEPS = 4  # of a generation
RESNET = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": {"model_type": "resnet", "out_features": ["stage4"]},
}
# what the config of a type needs to be a model: its own defaults are none
SPECIAL: dict[str, dict[str, Any]] = {
    "detr": RESNET,
    "conditional_detr": RESNET,
    "dab-detr": RESNET,
    "deformable_detr": RESNET,
    "table-transformer": RESNET,
    "autoformer": {"prediction_length": 6, "context_length": 12},
    "informer": {"prediction_length": 6, "context_length": 12},
    "time_series_transformer": {"prediction_length": 6, "context_length": 12},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl_text": {"head_dim": 128},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hrm_text": {"num_hidden_layers": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "blip-2": {"image_token_index": 120},
    "instructblip": {"image_token_index": 120},
    "instructblipvideo": {"video_token_index": 120},
    "vjepa2": {"crop_size": 64, "frames_per_clip": 4},
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model"}},
}


def list_types() -> list[str]:
    """Return the names of all types of models, without importing any model."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return list(MODEL_MAPPING_NAMES)


def list_writers(*, masked: bool = True) -> list[str]:
    """Return the names of the types that write text, which can be generated.

    masked: also those that can fill gaps, which are encoders first
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as WRITERS,
    )
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED,
    )

    return [x for x in WRITERS if masked or x not in MASKED]


def list_cases() -> Iterator[Case]:
    """Yield a case for every type of model, and a generation for those that write."""
    for name in list_types():
        build = partial(build_type, name)
        yield Case(name, "transformers", build, needs=("transformers",))
    for name in list_writers():
        build = partial(build_writer, name)
        yield Case(f"{name}:generate", "transformers", build, needs=("transformers",))


@contextlib.contextmanager
def quiet(seed: int = 0) -> Iterator[None]:
    """Draw from a seed, and say nothing."""
    import transformers

    transformers.logging.set_verbosity_error()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def read_found() -> dict[str, Any]:
    """Return what was found: [factor, number of the inputs], or why there is none."""
    return json.loads(FOUND.read_text("utf-8")) if FOUND.exists() else {}


# --- one pass of a model --------------------------------------------------------------


def build_type(name: str) -> tuple[nn.Module, Run]:
    """Build the model of a type, and what runs it."""
    found = read_found().get(name)
    if isinstance(found, str):
        raise NotBuiltError(found)
    with quiet():
        if found is None:
            model, run, _ = search(name)
            return model, run
        factor, number = found
        model = make_model(name, factor)
        inputs = next(islice(draw_inputs(name, model), number, None))
        return model, partial(call, inputs)


def search(name: str) -> tuple[nn.Module, Run, list[int]]:
    """Find the largest factor and the richest inputs with which a model runs."""
    from wild.shrink import FACTORS

    why: list[str] = []
    for factor in FACTORS:
        try:
            model = make_model(name, factor)
            run, number = find_inputs(name, model)
        except Exception as error:  # noqa: BLE001 (a factor may be impossible)
            why.append(describe(error))
            if isinstance(error, ImportError) or HOPELESS.search(str(error)):
                break
        else:
            return model, run, [factor, number]
    raise NotBuiltError(why[0] if len(why) == 1 else f"{why[0]}; {why[-1]}")


def make_model(name: str, factor: int) -> nn.Module:
    """Return the model of a type with one factor."""
    from transformers import AutoModel

    torch.manual_seed(0)
    config = make_config(name, factor)
    if factor < 16:
        with torch.device("meta"):
            check_size(AutoModel.from_config(config))
    return sharpen(AutoModel.from_config(config))


def make_config(name: str, factor: int) -> Any:
    """Return the shrunk config of a type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    from wild.shrink import join_parts, shrink, shrink_tokens

    config = CONFIG_MAPPING[name](**SPECIAL.get(name, {}))
    classes = MODEL_MAPPING_NAMES.get(name)
    if isinstance(classes, (list, tuple)):  # the first is the whole model
        config.architectures = [classes[0]]
    return join_parts(shrink_tokens(shrink(config, factor)))


def check_size(model: nn.Module) -> None:
    """Refuse a model that is too large."""
    size = sum(x.numel() for x in model.parameters())
    if size > LARGEST:
        raise NotBuiltError(f"{size / 1e6:.0f} million parameters")


def sharpen(model: nn.Module) -> nn.Module:
    """Move the weights far from their start, so that attention is far from even."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point() and weight.ndim == 2 and weight.numel():
                weight.add_(torch.randn_like(weight), alpha=weight[0].numel() ** -0.5)
    return fit_sections(model).eval()


def fit_sections(model: nn.Module) -> nn.Module:
    """Fit the sections of rotary embeddings of several axes, which defaults fix."""
    for module in model.modules():
        parts, rates = (getattr(module, x, None) for x in ("mrope_section", "inv_freq"))
        if parts is not None and rates is not None:
            n = len(rates)
            small = [max(1, x * n // sum(parts)) for x in parts]
            small[-1] += n - sum(small)
            module.mrope_section = small
    return model


def draw_inputs(name: str, model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield inputs for a model, always the same."""
    from wild.inputs import list_inputs

    torch.manual_seed(0)
    return list_inputs(model, left=name in list_writers(masked=False))


def find_inputs(name: str, model: nn.Module) -> tuple[Run, int]:
    """Return the first inputs that a model takes, and their number."""
    why = []
    for number, inputs in enumerate(draw_inputs(name, model)):
        try:
            with torch.no_grad(), torch.random.fork_rng():
                call(inputs, model)
        except Exception as error:  # noqa: BLE001 (inputs may be impossible)
            why.append(f"{'+'.join(inputs)}: {describe(error)}")
        else:
            return partial(call, inputs), number
    raise NotBuiltError(why[0] if why else "no inputs are known")


def call(inputs: dict[str, Any], model: nn.Module) -> Any:
    """Run a model once."""
    return model(**inputs)


def describe(error: BaseException) -> str:
    """Return type and first line of an error."""
    text = re.sub(r"/\S*/(site-packages/)?", "", str(error))  # no paths of a machine
    lines = text.strip().splitlines()
    kind = "" if isinstance(error, NotBuiltError) else f"{type(error).__name__}: "
    return f"{kind}{lines[0] if lines else ''}"[:160]


# --- a generation ---------------------------------------------------------------------


def build_writer(name: str) -> tuple[nn.Module, Run]:
    """Build the language model of a type, and what generates a few tokens."""
    from transformers import AutoModelForCausalLM

    from wild.inputs import make_text

    found = read_found().get(name)
    if isinstance(found, str):
        raise NotBuiltError(found)
    with quiet():
        config = make_config(name, found[0] if found else 16)
        model = sharpen(AutoModelForCausalLM.from_config(config))
        known = ("input_ids", "attention_mask")
        return model, partial(write, make_text(config, known, left=True))


def write(inputs: dict[str, Any], model: nn.Module) -> Any:
    """Generate a few tokens."""
    options = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
    return model.generate(**inputs, **options)


# --- what is found --------------------------------------------------------------------


def main() -> int:
    """Find how each type is built, or some types, and write it down."""
    torch.set_num_threads(1)
    found, names = read_found(), sys.argv[1:]
    for name in names or list_types():
        if name in found and not names:
            continue
        try:
            with quiet():
                *_, found[name] = search(name)
        except NotBuiltError as error:
            found[name] = str(error)
        print(name, found[name], flush=True)  # noqa: T201
        lines = (f"{json.dumps(x)}: {json.dumps(found[x])}" for x in sorted(found))
        FOUND.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
