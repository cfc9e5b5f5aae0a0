"""Any bytes are read, or refused in one sentence: what was found once, and more of it.

fuzz/ hunts for minutes, steered by the code that is reached; here its kept inputs are
tried, then some seconds of blind damage, with its limits of time and memory.
"""

import importlib
import importlib.util
import json
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Core
from tokenizers.models import WordLevel

from regard.errors import FileError, OptionError
from regard.learn.exercise import FOLDER, read_exercise
from regard.learn.in_browser import run_text
from regard.nn.tokens import Tokenizer, find_template

FUZZ = Path(__file__).parent.parent / "fuzz"
sys.path.append(str(FUZZ))

from hunt import MEMORY, Target, forget, judge, limit_memory, wander  # noqa: E402

NAMES = sorted(x.name for x in (FUZZ / "corpus").iterdir())
STEERED = [name for name in NAMES if name != "address"]
FEW = 1.0  # seconds for each target; CI hunts longer after the tests


def open_target(name):
    return importlib.import_module(name).TARGET


def read_kept(name):
    return [x.read_bytes() for x in sorted((FUZZ / "corpus" / name).iterdir())]


def test_every_target_has_a_corpus_and_all_are_small():
    files = {x.stem for x in FUZZ.glob("*.py")} - {"hunt", "steered", "damage"}
    assert files == set(NAMES)
    sizes = [x.stat().st_size for x in (FUZZ / "corpus").rglob("*") if x.is_file()]
    assert sum(sizes) < 1_000_000


@pytest.mark.parametrize("name", STEERED)
def test_kept_and_damaged_inputs_are_read_or_refused_in_a_sentence(name):
    kept = read_kept(name)
    tried, found = wander(open_target(name), kept, seconds=FEW, seed=0)
    assert [x.told for x in found] == []
    assert tried > len(kept)


@pytest.mark.parametrize("name", STEERED)
def test_good_inputs_are_read_and_not_only_refused(name):
    check, good = open_target(name).check, 0
    for path in sorted((FUZZ / "corpus" / name).iterdir()):
        if path.name.startswith("was-"):
            continue
        try:
            check(path.read_bytes())
            good += 1
        except FileError:
            assert path.name in ("other", "host", "post", "learner"), path.name
    assert good >= 2


def test_addresses_of_a_map_are_read_or_mended_in_a_browser():
    if shutil.which("chromium") is None and shutil.which("chromium-browser") is None:
        pytest.skip("the map is tested in Chromium: apt-get install chromium")
    done = hunt("address", 4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"address: \d+ inputs in .* 0 findings$", done.stdout.strip())


def test_a_steered_hunt_goes_on_where_it_was_and_says_what_came_of_it(tmp_path):
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("hunts are steered by atheris: pip install atheris")
    copy = shutil.copytree(FUZZ, tmp_path / "fuzz", ignore=lambda *_: ["found"])
    done = hunt("template", 4, folder=copy)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(
        r"template: [\d,]+ inputs in \d+ s, corpus of \d+, 0 findings", last
    )
    assert len(list((copy / "found" / "template" / "corpus").iterdir())) > 0
    (copy / "steered.py").write_text("1 / 0")
    done = hunt("template", 4, folder=copy)
    assert done.returncode == 1
    assert "template: not one input could be tried." in done.stderr


def hunt(name, seconds, folder=FUZZ):
    command = [sys.executable, str(folder / f"{name}.py"), f"--seconds={seconds}"]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120
    )


# What was found, each with the words that it is refused with now

WAS = {
    "recording/was-many-sequences": "sequence is 2147483648, expected 0 … 65535",
    "recording/was-name-that-is-no-text": "an array is missing",
    "recording/was-number-that-is-none": "it is damaged, or not a safetensors file",
    "recording/was-note-of-another-kind": "decoders is int, expected list",
    "folder/was-TypeError-weights": "index.json names .*, which is not there",
    "folder/was-OSError-weights": "index.json names .*, which is not there",
    "folder/was-sentence-families": "model_type='x{70,79}, expected one of",
    "folder/was-sentence-tokens": "tokenizer.json is damaged: invalid type: string",
    "folder/was-UnicodeEncodeError-tokens": "tokenizer_config.json is damaged: .utf-8",
    "folder/was-sentence-weights": "model.safetensors is damaged: Error while",
    "gguf_model/was-sentence-gguf_file": "a key is .*, expected 200 characters or less",
    "atlas_result/was-AttributeError-text": "it says nothing of itself",
    "atlas_result/was-TypeError-table": "set_aside holds 0, not a name and a reason",
    "atlas_result/was-TypeError-terminal_table": "missed has reasons that are no text",
    "atlas_result/was-ValueError-table": "set_aside holds .., not a name and a reason",
    "question/was-sentence-question": r"^.{1,40} is given 2 times, expected once",
}


@pytest.mark.parametrize("name", WAS)
def test_what_was_found_is_refused_with_words(name):
    target, _, file = name.partition("/")
    with pytest.raises(FileError, match=WAS[name]) as refused:
        open_target(target).check((FUZZ / "corpus" / target / file).read_bytes())
    assert str(refused.value).isprintable()


OWN = (FUZZ / "corpus" / "exercise" / "double").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            '"""Double it',
            '__doc__ = 5\n"""Double it',
            "docstring of title, empty line and text",
        ),
        ('("a", "b", "c")', '("a", 2, "c")', "HINTS has an item that is not a str"),
        ("NEEDS = ()", "NEEDS = (None,)", "NEEDS has an item that is not a str"),
        ('NAME = "double"', 'NAME = "a b"', "NAME is 'a b', expected an identifier"),
        ('NAME = "double"', f'NAME = "{"x" * 99}"', "expected an identifier"),
        ("MINUTES = 1", "MINUTES = -1", "MINUTES is -1, expected >= 0"),
        (
            "MINUTES = 1",
            "MINUTES = 1; ATOL = 'x'",
            "ATOL is 'x', expected 0 or more, as",
        ),
        (
            "MINUTES = 1",
            "MINUTES = 1; ATOL = 1e999",
            "ATOL is inf, expected 0 or more, as",
        ),
        ('EXTRA = ""', 'EXTRA = "\\x1b"', r'EXTRA is "\\u001b", expected one of'),
        ('"""That is the same."""', '""" """', "mistake_same has no docstring"),
        ("def mistake_same(x)", "mistake_same = 5\ndef f(x)", "has no docstring"),
        ("MINUTES = 1", "1 +* 2", "raised SyntaxError: invalid syntax"),
        ("MINUTES = 1", 'raise ValueError("a\\x1bb")', "raised ValueError: ab"),
    ],
)
def test_parts_of_an_exercise_that_cannot_be_used_are_refused(
    tmp_path, old, new, words
):
    path = tmp_path / "double.py"
    assert old in OWN
    path.write_text(OWN.replace(old, new), encoding="utf-8")
    with pytest.raises(FileError, match=words) as refused:
        read_exercise(path)
    assert str(refused.value).isprintable()


def test_a_reference_that_is_not_in_the_file_is_told(tmp_path):
    path = tmp_path / "double.py"
    path.write_text(OWN + "reference = len\n", encoding="utf-8")
    with pytest.raises(FileError, match="reference is not defined in this file"):
        _ = read_exercise(path).solution


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\ud800", "cannot be read: 'utf-8' codec can't decode"),
        ("x = " + "-" * 100_000 + "1", r"Python cannot read line \?"),
        ("def f(\tx", r"Python cannot read line 1 \(def f\( x\)"),
        ("a" * 5_000, "The file raised NameError in line 1 .*a…$"),
    ],
)
def test_a_learners_text_that_python_cannot_read_is_told(text, words):
    told = json.loads(run_text(str(FOLDER / "one_score.py"), text))["sentence"]
    assert re.search(words, told), told
    assert told.isprintable()
    assert len(told) < 1_000


def test_a_word_that_a_vocabulary_lacks_is_told():
    core = Core(WordLevel({"a": 0}, unk_token="gone"))
    assert Tokenizer(core).encode("a") == [0]
    with pytest.raises(OptionError, match=r"given 'b': WordLevel error: Missing"):
        Tokenizer(core).encode("b")


def test_of_several_templates_the_default_one_is_taken_whatever_the_others_are():
    some = [{"name": ["x"]}, 5, {"name": "default", "template": "it"}, {"name": None}]
    assert find_template(Path("/nowhere"), {"chat_template": some}) == "it"
    assert find_template(Path("/nowhere"), {"chat_template": some[:2]}) is None


# The hunt itself finds what there is to find


def make(check, tmp_path, monkeypatch):
    monkeypatch.setattr("hunt.HERE", tmp_path)
    return Target("toy", check, lambda rng, data: data + rng.randbytes(1))


def spin(_):
    while True:
        pass


def fill(_):
    return bytearray(
        2 * MEMORY
    )  # at once: in steps it would be slow, which is another key


def mumble(_):
    raise FileError("two\nlines")


def steer(_):
    raise FileError("\x1b[2J.")


def talk(_):
    raise FileError("x" * 10_000)


@pytest.mark.parametrize(
    ("check", "key"),
    [
        (lambda _: {}["a"], "KeyError"),
        (spin, "SlowError"),
        (fill, "MemoryError"),
        (mumble, "sentence"),
        (steer, "sentence"),
        (talk, "sentence"),
    ],
)
def test_whatever_breaks_the_promise_is_found_and_saved(
    check, key, tmp_path, monkeypatch
):
    monkeypatch.setattr("hunt.SECONDS", 0.2)
    target = make(check, tmp_path, monkeypatch)
    begun = time.process_time()
    tried, found = wander(target, [b"abc"], seconds=0, seed=0)
    assert time.process_time() - begun < 5
    assert tried == 2  # the corpus, then one new input
    assert found[0].key.startswith(key)
    (saved,) = (x for x in target.findings.iterdir() if x.suffix != ".txt")
    assert saved.read_bytes() == b"abc"
    forget(target)
    assert saved.exists()
    forget(replace(target, check=len))
    assert list(target.findings.iterdir()) == []


def test_a_refusal_in_a_sentence_is_no_finding(tmp_path, monkeypatch):
    def refuse(_):
        raise FileError("it is damaged.")

    target = make(refuse, tmp_path, monkeypatch)
    tried, found = wander(target, [b"abc"], seconds=0.1, seed=0)
    assert tried > 1
    assert found == []
    assert not target.findings.exists()


def test_the_limits_are_gone_afterwards():
    with limit_memory(2**20), pytest.raises(MemoryError):
        np.empty(2**34, np.uint8)  # more than other threads may give back meanwhile
    assert len(bytearray(2**28)) == 2**28
    assert judge(lambda _: None, b"") is None


@pytest.mark.parametrize("name", NAMES)
def test_damage_changes_bytes_and_knows_the_form(name):
    rng, target = random.Random(0), open_target(name)
    for data in read_kept(name):
        made = {target.damage(rng, data) for _ in range(30)}
        assert len(made) > 15
