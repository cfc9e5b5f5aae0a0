"""Searches over many pairs: their numbers, three runners, a kill, what is set aside."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy import stats
from search_model import make
from tiny_models import SPECIAL, WORDS, make_tokenizer, save_tiny

from regard.__main__ import main
from regard.ablate.attribute_heads import attribute_heads
from regard.ablate.search_heads import search_heads
from regard.atlas.pairs import Pair, PairShard, read_prompt_pairs
from regard.atlas.runners import RunnerOptions
from regard.atlas.search_pairs import search_pairs
from regard.atlas.search_results import PairSearch, read_search, unpack_shard
from regard.atlas.search_settings import SearchSettings, begin_search
from regard.atlas.search_worker import SearchWorker
from regard.atlas.settings import fingerprint
from regard.errors import FileError, OptionError
from regard.seen import watch

HERE = Path(__file__).parent
MODEL, LOOP = "search_model:make", RunnerOptions(runner="loop")
TEXTS = ["a cat sat", "one mat", "the dog ran", "who reads", "no head is", "weights"]
PAIRS = [
    Pair(text, text.replace(text[at], "xyz"[at]), "A", "BCDEFGHIJK"[i + at])
    for i, text in enumerate(TEXTS)
    for at in (0, 1)
][:10]
ENV = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}


def write_pairs(path, pairs=PAIRS):
    names = ("clean", "corrupted", "answer", "wrong")
    rows = (dict(zip(names, astuple(x), strict=False)) for x in pairs)
    path.write_text("\n\n".join(map(json.dumps, rows)))  # empty lines do not count
    return str(path)


def read_table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def check_same(one, two):
    for name in ("clean", "corrupted", "changes", "estimates"):
        assert getattr(one, name).tobytes() == getattr(two, name).tobytes(), name
    assert (one.layers, one.heads) == (two.layers, two.heads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("search") / "a"


@pytest.fixture(scope="module")
def plain(folder):
    """The search of a plain loop."""
    return search_pairs(MODEL, PAIRS, folder, crew=LOOP)


def test_every_number_is_that_of_a_search_of_one_pair(plain):
    model = make()
    model.network.eval()
    changes, estimates, ends = [], [], []
    for pair in PAIRS:
        clean, corrupted = (
            torch.tensor([model.words.encode(x)]) for x in (pair.clean, pair.corrupted)
        )
        right, wrong = ord(pair.answer), ord(pair.wrong)

        def measure(logits, right=right, wrong=wrong):
            return logits[:, -1, right] - logits[:, -1, wrong]

        with watch(model.network, keep="qkv") as source, torch.no_grad():
            logits = model.network(clean)
        with torch.no_grad():
            ends.append([measure(x).item() for x in (logits, model.network(corrupted))])
        found = search_heads(model.network, corrupted, source, measure)
        changes.append(found.changes.flatten().numpy())
        found = attribute_heads(model.network, corrupted, source, measure)
        estimates.append(found.changes.flatten().numpy())
    changes, estimates, ends = map(np.array, (changes, estimates, ends))
    np.testing.assert_allclose(plain.changes, changes, atol=1e-6)
    np.testing.assert_allclose(plain.estimates, estimates, atol=1e-6)
    np.testing.assert_allclose(np.stack([plain.clean, plain.corrupted], 1), ends, 1e-5)
    assert plain.places == [(i, h) for i in range(2) for h in range(4)]
    assert np.abs(changes).max() > 0.01

    mean = changes.mean(0)
    np.testing.assert_allclose(plain.mean, mean, atol=1e-6)
    for sure in (0.95, 1 - 0.05 / 8):  # of one head, and of all 8
        low, high = stats.t.interval(sure, 9, mean, stats.sem(changes))
        np.testing.assert_allclose(plain.half(sure), (high - low) / 2, rtol=2e-3)
    np.testing.assert_array_equal(plain.is_sure, (low > 0) | (high < 0))
    way = ends[:, 0] - ends[:, 1]
    low, high = stats.t.interval(0.95, 9, way.mean(), stats.sem(way))
    share = mean / way.mean() if low > 0 or high < 0 else np.full(8, np.nan)
    np.testing.assert_allclose(plain.share, share, rtol=1e-4)
    over = np.corrcoef(estimates.mean(0), mean)[0, 1]
    assert plain.correlation == pytest.approx(over, abs=1e-4)
    ones = [np.corrcoef(a, b)[0, 1] for a, b in zip(estimates, changes, strict=True)]
    np.testing.assert_allclose(plain.correlations, ones, atol=1e-4)


def test_the_files_hold_the_numbers(plain, folder):
    check_same(plain, read_search(folder))
    rows = read_table(folder / "heads.csv")
    assert [float(x["change"]) for x in rows] == plain.mean.tolist()
    assert [float(x["half"]) for x in rows] == plain.half().tolist()
    assert [(int(x["layer"]), int(x["head"])) for x in rows] == plain.places
    rows = read_table(folder / "pairs.csv")
    assert [float(x["clean"]) for x in rows] == plain.clean.tolist()
    assert [int(x["line"]) for x in rows] == list(range(1, 11))


def test_a_pair_that_killed_its_process_is_set_aside_by_the_next(plain):
    """What the supervisor asks of a worker after that; test_atlas.py kills some."""
    plan = SearchSettings(model=MODEL, pairs="", count=3)
    pairs = (PAIRS[0], Pair("CRASH a", "CRASH b", "A", "B", line=7), PAIRS[1])
    data = SearchWorker(plan)(PairShard(5, pairs), skip={pairs[1].digest})
    found = unpack_shard(data)
    assert found.aside == ((7, "it ended its process, again and again"),)
    np.testing.assert_array_equal([x.changes for x in found.pairs], plain.changes[:2])


def test_a_damaged_file_is_computed_again(tmp_path, plain):
    search_pairs(MODEL, PAIRS, tmp_path, crew=LOOP)
    path = sorted(tmp_path.glob("results/*.json"))[1]
    path.write_text(path.read_text().replace("0.1", "0.2", 1))
    told = []
    found = search_pairs(MODEL, PAIRS, tmp_path, crew=LOOP, progress=told.append)
    check_same(plain, found)
    assert [(x.done, x.of, x.aside) for x in told] == [(6, 10, 0), (10, 10, 0)]
    assert told[0].damaged == (path.name,)


SET_ASIDE = {
    "clean has 3 tokens and corrupted 4, expected the same number": ("abc", "abcd"),
    "clean and corrupted have the same tokens": ("abc", "abc"),
    "the prompts have 24 tokens, expected 1 to 23": ("a" * 24, "b" * 24),
    "'AB' is 2 tokens after the clean prompt, expected one token. Is it ' AB'?": (
        "abc",
        "abd",
        "AB",
    ),
    "answer and wrong are the same token, 'W'": ("abc", "abd", "W"),
    "RuntimeError: a prompt that breaks the model": ("CRASH a", "CRASH b"),
    "ArithmeticError: NaN or infinity in the clean run": ("ab\x01", "abc"),
    "the measure is NaN without a patch, expected a number": ("abc", "ab\x01"),
}


def test_pairs_are_set_aside_with_their_reason_and_change_no_number(
    tmp_path, plain, monkeypatch
):
    bad = [Pair(*(*texts, "A")[:3], "W") for texts in SET_ASIDE.values()]
    pairs = [x for both in zip(bad, PAIRS, strict=False) for x in both]
    found = search_pairs(MODEL, [*pairs, *PAIRS[8:]], tmp_path, crew=LOOP)
    check_same(plain, found)
    assert found.aside == tuple(zip(range(1, 17, 2), SET_ASIDE, strict=True))
    text = str(found)
    assert "Pairs set aside, not in these numbers: 8\n  line 1: clean has 3" in text
    assert text.endswith("\n  and 3 more, in pairs.csv")
    rows = read_table(tmp_path / "pairs.csv")
    assert [x["set_aside"] for x in rows][::2][:8] == list(SET_ASIDE)


def test_a_search_without_a_pair_says_why(tmp_path):
    with pytest.raises(OptionError, match=r"1 were set aside. Line 1: clean and corr"):
        search_pairs(MODEL, [Pair("a", "a", "A", "B")], tmp_path, crew=LOOP)


IN_WORDS = [
    Pair(f"the cat sat on {x}", f"the dog sat on {x}", " ran", " mat") for x in ".:a"
]


def test_a_model_of_transformers_is_searched(tmp_path):
    network = save_tiny("phi", tmp_path / "phi")
    found = search_pairs(str(tmp_path / "phi"), IN_WORDS, tmp_path / "out", crew=LOOP)
    ids = [list(map(WORDS.index, x.clean.split())) for x in IN_WORDS]
    clean = torch.tensor(ids) + len(SPECIAL)
    corrupted = clean.clone()
    corrupted[:, 1] = len(SPECIAL) + WORDS.index("dog")
    right, wrong = (len(SPECIAL) + WORDS.index(x) for x in ("ran", "mat"))
    layer = network.model.layers[1].self_attn.dense  # its input: heads of 8 numbers
    kept = []
    hook = layer.register_forward_pre_hook(lambda _, x: kept.append(x[0].clone()))
    with torch.no_grad():
        network(clean)
        hook.remove()

        def patch(_, given):
            (x,) = given
            x = x.clone()
            x[..., 16:24] = kept[0][..., 16:24]
            return (x,)

        ends = [network(corrupted).logits[:, -1]]
        with layer.register_forward_pre_hook(patch):
            ends.append(network(corrupted).logits[:, -1])
    before, after = (x[:, right] - x[:, wrong] for x in ends)
    at = found.places.index((1, 2))
    assert found.changes[:, at] == pytest.approx((after - before).numpy(), abs=1e-5)
    assert np.abs(found.changes[:, at]).min() > 1e-3


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bert", "Line 1: the model reads ahead, expected a causal language model"),
        ("t5", "t5 is a T5ForConditionalGeneration, expected an nn.Module that pred"),
    ],
)
def test_a_model_that_predicts_no_next_token_is_refused(tmp_path, kind, message):
    save_tiny(kind, tmp_path / kind)
    make_tokenizer(ends=False).save_pretrained(tmp_path / kind)
    with pytest.raises(OptionError, match=message):
        search_pairs(str(tmp_path / kind), IN_WORDS, tmp_path / "out", crew=LOOP)


def test_a_folder_of_another_search_is_refused(tmp_path, folder, plain):
    def go(pairs, out, **options):
        search_pairs(MODEL, pairs, out, crew=LOOP, **options)

    with pytest.raises(OptionError, match="a search over 10 other pairs, given 9"):
        go(PAIRS[:9], folder)
    with pytest.raises(OptionError, match="a search with batch=16, given 4"):
        go(PAIRS, folder, batch=4)
    (tmp_path / "about.json").write_text('{"plan": {"corpus": []}, "model": ""}')
    with pytest.raises(FileError, match="holds no search over pairs"):
        go(PAIRS, tmp_path)
    with pytest.raises(OptionError, match="precision='half', expected one of float32"):
        go(PAIRS, tmp_path / "b", precision="half")


def test_a_model_that_changed_is_refused_when_a_search_goes_on(tmp_path):
    save_tiny("phi", tmp_path / "phi")
    plan = SearchSettings(model=str(tmp_path / "phi"), pairs="", count=3)
    (tmp_path / "out").mkdir()
    begin_search(tmp_path / "out", plan)
    begin_search(tmp_path / "out", plan)
    path = tmp_path / "phi" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(OptionError, match=r"is another model than .*out began with"):
        begin_search(tmp_path / "out", plan)


def test_a_function_that_returns_other_weights_is_refused(tmp_path, monkeypatch):
    search_pairs(MODEL, PAIRS, tmp_path, crew=LOOP)
    first, second, *_ = sorted((tmp_path / "results").glob("*.json"))
    second.unlink()
    monkeypatch.setenv("SEARCH_SEED", "1")
    with pytest.raises(OptionError, match="search_model:make returned other weights"):
        search_pairs(MODEL, PAIRS, tmp_path, crew=LOOP)
    assert first.exists()
    assert not second.exists()
    monkeypatch.delenv("SEARCH_SEED")
    search_pairs(MODEL, PAIRS, tmp_path, crew=LOOP)
    assert second.exists()


def test_a_fingerprint_covers_the_middle_of_a_file(tmp_path):
    """A small file completely, a large one in blocks at equal distances."""
    for size, changed in ((5_000_000, 1), (300_000_000, 400_000)):
        path = tmp_path / "model.gguf"
        with path.open("wb") as file:
            file.truncate(size)
        found = {fingerprint(str(path))}
        assert found == {fingerprint(str(path))}
        for at in (0, size // 2, size // 2 + 70_000, size - changed):
            with path.open("r+b") as file:
                file.seek(at)
                file.write(b"1" * changed)
            found.add(fingerprint(str(path)))
        assert len(found) == 5
        path.unlink()


def test_a_pair_that_is_given_twice_is_refused_whatever_its_line():
    known = read_prompt_pairs(PAIRS)
    assert len(known) == 10
    with pytest.raises(OptionError, match=r"pair 1 is a copy of pair 1\. Rem"):
        read_prompt_pairs([*known, *known])


def test_an_empty_answer_is_named(tmp_path):
    for i, texts in enumerate((("", "B"), ("A", ""))):
        pairs, out = [Pair("abc", "abd", *texts)], tmp_path / str(i)
        with pytest.raises(OptionError, match="Line 1: answer or wrong is empty, exp"):
            search_pairs(MODEL, pairs, out, crew=LOOP)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there are no pairs"),
        ("{", 'pairs.jsonl line 1 is not JSON .* Write {"clean": "…", "corrupted":'),
        (
            '\n{"clean": "a", "wrong": 3}',
            "line 2 has no text corrupted, answer, wrong.",
        ),
        ("[]", "line 1 has no text clean, corrupted, answer, wrong."),
        (json.dumps(vars(PAIRS[0])) + "\n" + json.dumps(vars(PAIRS[0])), "pair 2 is a"),
    ],
)
def test_a_file_of_pairs_says_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "pairs.jsonl"
    path.write_text(text)
    with pytest.raises((OptionError, FileError), match=message):
        search_pairs(MODEL, path, tmp_path / "a")
    path.unlink()
    with pytest.raises(FileError, match="cannot be read: No such file"):
        search_pairs(MODEL, path, tmp_path / "a")


TABLE = """\
8 pairs, 3 heads; one head at a time, the corrupted run gets
the output that this head has in the clean run

logit(answer) - logit(wrong)    mean   above 0
  clean                        +2.00   8 of 8
  corrupted                    -1.00   1 of 8

layer  head  change   95 % interval       share  estimate
    1     0  +1.500   +1.053 to +1.947 *  50.0%    +1.200
    0     1  -0.500   -0.947 to -0.053   -16.7%    -0.200
    0     0  +0.000   +0.000 to +0.000     0.0%    +0.100

change     of the logit difference, mean over pairs
share      of the way from the corrupted to the clean run
estimate   of the change, by attribution patching: one backward pass
*          0 is outside of an interval for all heads at once: 1 of 3 heads
Correlation of estimate and change over heads: 1.00 (in single pairs 0.95 to 0.98)
Pairs set aside, not in these numbers: 1
  line 9: a reason"""


def make_search(count):
    sides = np.where(np.arange(count) % 2, 0.5, -0.5)
    changes = np.stack([0 * sides, sides - 0.5, sides + 1.5], 1)
    return PairSearch(
        model="m",
        layers=("a", "b"),
        heads=(2, 1),
        lines=tuple(range(1, count + 1)),
        clean=np.full(count, 2.0),
        corrupted=np.array([6.0] + [-2.0] * (count - 1)),
        changes=changes,
        estimates=np.tile([0.1, -0.2, 1.2], (count, 1)),
        aside=((9, "a reason"),),
    )


def test_a_share_is_unknown_if_the_way_from_corrupted_to_clean_may_be_0(tmp_path):
    sides = np.where(np.arange(8) % 2, 0.5, -0.5)
    found = replace(make_search(8), corrupted=1.999 + sides)
    assert np.isnan(found.share).all()
    assert "*unknown    +1.200" in str(found)
    assert "share      of the way from the corrupted to the clean run: unk" in str(
        found
    )
    found.save(tmp_path)
    assert {x["share"] for x in read_table(tmp_path / "heads.csv")} == {"nan"}
    far = replace(make_search(8), corrupted=1 + sides)
    np.testing.assert_allclose(far.share, [0, -0.5, 1.5])
    assert np.isnan(make_search(7).share).all()


def test_a_search_is_printed_as_a_table():
    assert str(make_search(8)) == TABLE
    few = str(make_search(7))
    assert "An interval needs at least 8 pairs." in few
    assert "*" not in few


def test_a_killed_search_goes_on_with_the_same_command_and_ends_with_the_same_bits(
    tmp_path, plain, folder
):
    out = tmp_path / "b"
    words = ["atlas", "search", MODEL, write_pairs(tmp_path / "pairs.jsonl")]
    words += ["--out", str(out), "--runner", "loop"]
    command = [sys.executable, "-m", "regard", *words]
    driver = subprocess.Popen(command, env=ENV | {"SEARCH_SLOW": "0.03"})
    deadline = time.monotonic() + 120
    while not list(out.glob("results/*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    assert driver.wait() == -signal.SIGKILL
    (kept,) = out.glob("results/*.json")
    before = kept.stat().st_mtime_ns
    assert read_search(out).left == 6
    assert "Pairs that were not run yet: 6" in str(read_search(out))

    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert kept.stat().st_mtime_ns == before
    check_same(plain, read_search(out))
    assert (out / "heads.csv").read_bytes() == (folder / "heads.csv").read_bytes()
    table, _, end = done.output.partition("\n\n6 pairs were run now, in 0.")
    assert table == str(read_search(out))
    assert end.endswith(
        f" minutes.\nAll heads: {out}/heads.csv, all pairs: {out}/pairs.csv\n"
    )
    assert read_search(out).lines == tuple(range(1, 20, 2))  # lines of the file


@pytest.mark.slow
def test_a_pool_gives_the_same_bits(tmp_path, plain):
    crew = RunnerOptions(workers=2)
    check_same(plain, search_pairs(MODEL, PAIRS, tmp_path, crew=crew))


@pytest.mark.slow
def test_ray_gives_the_same_bits(tmp_path, plain, monkeypatch):
    code = (
        "import sys; from test_search_pairs import *\n"
        "search_pairs(MODEL, PAIRS, sys.argv[1], crew=RunnerOptions(runner='ray', "
        "workers=1))"
    )
    ray = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    subprocess.run(
        [sys.executable, "-c", code, tmp_path], env=ENV | ray, check=True, timeout=300
    )
    check_same(plain, read_search(tmp_path))
