"""A real vLLM server with a small random model, and clients that ask it over loopback.

python served_model.py FOLDER --requests 1000 --clients 16
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from small_models import make_model

import regard

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}
CHAT = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"


def save_model(folder):
    """Save a small random Llama and its tokenizer."""
    make_model("llama", folder)
    save_tokenizer(folder)


def save_tokenizer(folder):
    """Save a tokenizer of words: w0, w1, … w508, and the roles of a chat."""
    words = {f"w{i}": i for i in range(509)} | {"user": 509, "assistant": 510, "?": 511}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="?", chat_template=CHAT
    )
    tokenizer.save_pretrained(folder)


@contextmanager
def serve(model, log, *, options=(), recordings=None, bind="nobind", **limits):
    """Run `vllm serve` in a process group of its own; yield its port and process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = SETTINGS | {"VLLM_CPU_OMP_THREADS_BIND": bind}
    if recordings is not None:
        settings["REGARD_RECORD_DIR"] = str(recordings)
        settings |= {f"REGARD_RECORD_{x.upper()}": str(n) for x, n in limits.items()}
    command = [
        # `vllm serve` asks for the version of a package named vllm; the CPU build is
        # vllm-cpu, so the same server is started by its module
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--host", "127.0.0.1", "--port", str(port), "--enforce-eager",
        "--dtype", "float32", "--max-model-len", "512", "--max-num-batched-tokens", "256",
        "--served-model-name", "small", *options,
    ]  # fmt: skip
    with Path(log).open("wb") as out:
        process = subprocess.Popen(
            command,
            env=os.environ | settings,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_until_ready(process, port, log)
            yield port, process
        finally:
            stop(process)


def wait_until_ready(process, port, log, seconds=240):
    """Wait until the server answers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            if ask(port, None, path="/health", method="GET")[0] == 200:
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError("the server did not start:\n" + Path(log).read_text()[-4000:])


def stop(process):
    """Stop a server and its workers."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
            process.wait(30)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def ask(port, body, *, path="/v1/completions", method="POST", headers=()):
    """Return the status of a request, and the answer's JSON or text."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        sent = None if body is None else json.dumps(body)
        kind = {"Content-Type": "application/json"}
        link.request(method, path, sent, headers=kind | dict(headers))
        answer = link.getresponse()
        text = answer.read().decode()
    finally:
        link.close()
    return answer.status, json.loads(text) if text.startswith("{") else text


def make_body(prompt, *, new=8, record=False, **more):
    """Return the body of a completion."""
    body = {
        "model": "small",
        "prompt": prompt,
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return body | ({"vllm_xargs": {"regard": "qk"}} if record else {}) | more


def ask_many(port, count, *, clients=16, share=0.05, seed=0):
    """Send requests from several clients; return those that were recorded, by id."""
    rng = np.random.default_rng(seed)
    jobs = [
        (
            rng.integers(3, 500, int(rng.integers(1, 200))).tolist(),
            bool(rng.random() < share),
        )
        for _ in range(count)
    ]

    def send(job):
        prompt, record = job
        status, answer = ask(port, make_body(prompt, record=record))
        assert status == 200, answer
        return answer["id"], prompt, answer["choices"][0]["token_ids"], record

    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(send, jobs))
    return {name: (prompt, new) for name, prompt, new, record in answers if record}


def wait_for_recordings(folder, count, seconds=60):
    """Return the files of a folder once there are so many."""
    end = time.monotonic() + seconds
    while len(found := sorted(Path(folder).glob("*.regard"))) < count:
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    return found


@torch.no_grad()
def compare(files, asked, model):
    """Return the largest difference of the weights of any recording from eager ones.

    Every request that asked has one file, with its own tokens.
    """
    eager = transformers.AutoModelForCausalLM.from_pretrained(
        model, attn_implementation="eager", dtype=torch.float32
    )
    worst, left = 0.0, dict(asked)
    for file in files:
        name = next(x for x in left if file.name.startswith(x))
        prompt, new = left.pop(name)
        seen = regard.open(file)
        tokens = [*prompt, *new][:-1]  # the last one is never read
        assert seen.recording.tokens == (tuple(tokens),), name
        assert len(seen.layers) == 2, str(seen)
        expected = eager(torch.tensor([tokens]), output_attentions=True).attentions
        for layer, record in zip(expected, seen.records, strict=True):
            first = int(record.q_positions[0])
            found = torch.as_tensor(np.array(record.weights()))
            worst = max(worst, float((found - layer[0, :, first:]).abs().max()))
    assert not left, f"not recorded: {sorted(left)}"
    return worst
