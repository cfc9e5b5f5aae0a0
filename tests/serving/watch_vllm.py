"""Run vLLM with and without the lens in a process of its own, and print what was found.

    python watch_vllm.py '{"model": "llama", "requests": 200, "ranks": 2}'

The answers must be the same tokens and log-probabilities; every record is compared with
transformers' eager attention over the same tokens. The result is one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

import numpy as np
import torch
import transformers
from small_models import make_model
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

import regard

DEFAULTS = {
    "model": "llama",
    "dtype": "float32",
    "requests": 24,
    "samples": 1,
    "new": 6,
    "longest": 400,
    "ranks": 1,
    "blocks": 0,  # of the KV cache; 0 means enough for all
    "engine": {},  # options of vllm.LLM
    "repeat": True,  # run once without the lens, and compare
}


def make_prompts(count, longest):
    """Return prompts of random length; a third begins as another one does."""

    rng = np.random.default_rng(0)
    prompts = []
    for _ in range(count):
        own = rng.integers(3, 500, int(rng.integers(1, longest + 1))).tolist()
        if prompts and rng.random() < 0.3:
            other = prompts[rng.integers(len(prompts))]
            own = (other[: int(0.8 * len(other))] + own)[:longest]
        prompts.append(own)
    return prompts


def read_counters(llm):
    """Return vLLM's own counts of preemptions and of tokens from the prefix cache."""
    found = {x.name: getattr(x, "value", None) for x in llm.get_metrics()}
    names = {"preemptions": "num_preemptions", "cached": "prefix_cache_hits"}
    return {key: found.get(f"vllm:{name}") for key, name in names.items()}


def generate(llm, prompts, settings):
    """Return tokens and log-probabilities of all answers, from an empty prefix cache."""

    llm.reset_prefix_cache()
    params = SamplingParams(
        n=settings["samples"],
        max_tokens=settings["new"],
        temperature=0 if settings["samples"] == 1 else 1.0,
        ignore_eos=True,
        detokenize=False,
        logprobs=1,
    )
    asked = [TokensPrompt(prompt_token_ids=x) for x in prompts]
    return [
        (
            list(answer.prompt_token_ids),
            list(one.token_ids),
            [sorted((k, v.logprob) for k, v in x.items()) for x in one.logprobs],
        )
        for answer in llm.generate(asked, params, use_tqdm=False)
        for one in answer.outputs
    ]


def compare(seen, answers, folder, dtype):
    """Return the largest difference of any weight from transformers' eager attention."""

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=getattr(torch, dtype)
    )
    worst, rows = 0.0, 0
    for i, (prompt, new, _) in enumerate(answers):
        tokens = [*prompt, *new][:-1]  # the last one is never read
        assert seen.recording.tokens[i] == tuple(tokens), f"sequence {i}: other tokens"
        expected = model(torch.tensor([tokens]), output_attentions=True).attentions
        for layer, name in enumerate(seen.layers):
            record = seen.layer(name, sequence=i)
            q, k = map(torch.as_tensor, (record.q_positions, record.k_positions))
            assert int(k[-1]) == int(q[-1]) == len(tokens) - 1
            hidden = expected[layer][0, :, q, : int(k[0])]
            weights = expected[layer][0, :, q][..., k]
            found = torch.as_tensor(record.weights())
            worst = max(worst, float((found - weights).abs().max()))
            worst = max([worst, *hidden.abs().flatten().tolist()])
            rows += record.q.shape[1]
    return worst, rows


def main(settings):
    """Run, and print what was found."""
    ranks = settings["ranks"]
    if ranks > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))

    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as folder:
        make_model(settings["model"], folder)
        options = {
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_batched_tokens": 128,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
            **settings["engine"],
        }
        if settings["blocks"]:
            options["num_gpu_blocks_override"] = settings["blocks"]
        llm = LLM(
            folder, dtype=settings["dtype"], tensor_parallel_size=ranks, **options
        )
        prompts = make_prompts(settings["requests"], settings["longest"])
        bare = generate(llm, prompts, settings) if settings["repeat"] else None
        before = read_counters(llm)
        began = time.perf_counter()
        with regard.watch(llm) as seen:
            answers = generate(llm, prompts, settings)
            seconds = time.perf_counter() - began
        after = read_counters(llm)
        again = generate(llm, prompts, settings) if settings["repeat"] else None
        found = {
            "same": bare == answers == again if settings["repeat"] else None,
            "counts": {x: after[x] - before[x] for x in after if after[x] is not None},
            "seconds": seconds,
            "records": len(seen.records),
            "text": str(seen),
            "prompt_rows": sum(map(len, prompts)),
        }
        if seen.records:
            worst, rows = compare(seen, answers, folder, settings["dtype"])
            found |= {"worst": worst, "rows": rows}
            found["findings"] = [str(x) for x in seen.audit()]
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    main(DEFAULTS | json.loads(sys.argv[1]))
