"""vLLM, watched: the same answers, and the weights of transformers, request by request.

Each test starts a real engine in a process of its own (watch_vllm.py).
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vLLM has an environment of its own: python3 .ci/environment.py --serving",
        allow_module_level=True,
    )
CROWDED = {"new": 16, "blocks": 24, "engine": {"block_size": 32}}  # room for four


def run(**settings):
    """Return what watch_vllm.py finds."""
    return run_script("watch_vllm.py", json.dumps(settings))


def run_script(name, given):
    """Return what a script of this folder prints."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / name), given],
        capture_output=True,
        text=True,
        check=False,
        timeout=560,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(lines[-1])


@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma2", "gptoss"])
def test_answers_are_the_same_and_weights_those_of_transformers(model):
    """200 requests, in chunks, preempted, and with prefixes from the cache."""
    found = run(model=model, requests=200, **CROWDED)
    assert found["same"]
    assert found["records"] == 400
    assert found["worst"] < 1e-5
    assert found["counts"]["preemptions"] > 0
    assert found["counts"]["cached"] > 0
    assert "2 of 2 attention layers seen, 200 sequences" in found["text"]
    assert all(x.startswith("note: positions do not start") for x in found["findings"])


@pytest.mark.parametrize("model", ["llama", "gptoss"])
def test_two_ranks_give_all_heads_in_order(model):
    found = run(model=model, requests=40, ranks=2, **CROWDED)
    assert found["same"]
    assert found["records"] == 80
    assert found["worst"] < 1e-5


def test_samples_of_one_prompt_are_sequences_of_their_own():
    found = run(requests=6, samples=3, longest=200, repeat=False)  # they are random
    assert found["records"] == 36
    assert found["worst"] < 1e-5


def test_compiled_models_are_recorded_in_bfloat16():
    engine = {"enforce_eager": False}
    found = run(requests=12, dtype="bfloat16", longest=200, engine=engine)
    assert found["same"]
    assert found["records"] == 24
    assert found["worst"] < 0.1  # eager attention rounds its weights to bfloat16


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"kv_cache_dtype": "fp8"}, "its KV cache is quantized (fp8"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2,
                                    "prompt_lookup_max": 3}},
            "speculative decoding is not followed",
        ),
    ],
    ids=["quantized", "speculative"],
)  # fmt: skip
def test_what_cannot_be_recorded_is_reported(engine, reason):
    found = run(requests=4, longest=60, engine=engine)
    assert found["same"]
    assert found["records"] == 0
    assert "0 of 2 attention layers seen" in found["text"]
    assert found["text"].count(reason) == 2


def test_latent_keys_are_reported():
    # not repeated: bare vLLM gives this model other answers from run to run on a CPU
    found = run(model="deepseek", requests=4, longest=60, repeat=False)
    assert found["records"] == 0
    assert found["text"].count("its keys are latent (MLA)") == 2


def test_an_atlas_with_vllm_is_that_of_torch(tmp_path):
    """The function is the one of docs/howto/watch-vllm.md."""
    found = run_script("atlas_vllm.py", str(tmp_path))
    assert found["documents"] == [51, 51]
    assert len(found["layers"]) == 2
    assert max(found["worst"].values()) < 1e-4
