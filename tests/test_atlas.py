"""Atlases: three runners with one meaning, workers that die, runs that go on."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from atlas_model import make
from processes import list_processes

from regard.arrays import to_numpy
from regard.atlas.corpus import open_corpus, plan_corpus
from regard.atlas.example import Place, record_example
from regard.atlas.job import find_widest, lock, run_atlas
from regard.atlas.runners import RunnerOptions
from regard.atlas.settings import Settings, make_settings, read_plan
from regard.atlas.store import Result, Store, encode_result, merge_results
from regard.atlas.supervisor import Supervisor
from regard.atlas.table import compare_atlases, read_table
from regard.atlas.tally import tally_nothing
from regard.atlas.terminal_table import tell_left_out
from regard.errors import FileError, OptionError, RegardError
from regard.seen import watch
from regard.stats.table import make_table, measure_rows

HERE = Path(__file__).parent
WORDS = [
    "the",
    "attention",
    "of",
    "a",
    "head",
    "is",
    "read",
    "by",
    "who",
    "asks",
    "for",
    "its",
    "weights",
    "and",
    "no",
    "one",
    "else",
]


def write_corpus(folder, count=40, seed=0):
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        text = f"{i}: " + " ".join(rng.choices(WORDS, k=rng.randint(5, 30)))
        (folder / f"{i}.txt").write_text(text)
    return folder


def plan_for(corpus, **options):
    given = {"length": 48, "shard": 4, "examples": 2} | options
    return Settings(model="atlas_model:make", corpus=(str(corpus),), **given)


def check_same(one, two):
    """Two folders hold the same table, to the last bit."""
    a, b = read_table(one), read_table(two)
    for name in ("sums", "peak", "top"):
        x, y = (getattr(t.tally, name) for t in (a, b))
        assert x.tobytes() == y.tobytes(), name
    assert dict(a.found) == dict(b.found)
    assert {**a.about, "folder": ""} == {**b.about, "folder": ""}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("texts") / "texts")


@pytest.fixture(scope="module")
def plain(tmp_path_factory, corpus):
    """The atlas of a plain loop."""
    folder = tmp_path_factory.mktemp("plain")
    run_atlas(folder, crew=RunnerOptions(runner="loop"), plan=plan_for(corpus))
    return folder


def test_every_number_is_what_the_lens_says_of_each_document(plain, corpus):
    model, table = make(), read_table(plain)
    assert table.about["documents"] == 40
    sums = {name: [[], []] for name in table.statistics}
    for path in corpus.iterdir():
        ids = model.words.encode(path.read_text())[:48]
        with watch(model.network) as seen, torch.inference_mode():
            model.network(torch.tensor([ids]))
        rows = make_table(seen.recording).rows
        for name in table.statistics:
            # a mean over the queries that have it: all, or all but the first
            n = len(ids) - (name == "previous")
            if name == "induction":
                last, n = {}, 0
                for token in ids:
                    n += token in last
                    last[token] = True
            mean = rows[name].reshape(2, 4)
            sums[name][0].append(np.nan_to_num(mean) * n)
            sums[name][1].append(n)
    for name, (totals, counts) in sums.items():
        expected = np.sum(totals, 0) / np.sum(counts)
        np.testing.assert_allclose(table.mean(name), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_the_pool_and_any_number_of_workers_give_the_same_bits(tmp_path, plain, corpus):
    run_atlas(tmp_path, crew=RunnerOptions(workers=3), plan=plan_for(corpus))
    check_same(plain, tmp_path)


def test_the_order_of_the_files_and_their_kind_do_not_matter(tmp_path, plain, corpus):
    texts = [path.read_text() for path in corpus.iterdir()]
    random.Random(1).shuffle(texts)
    lines = tmp_path / "texts.jsonl"
    lines.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    run_atlas(tmp_path / "a", crew=RunnerOptions(runner="loop"), plan=plan_for(lines))
    one, two = read_table(plain).tally, read_table(tmp_path / "a").tally
    assert one.sums.tobytes() == two.sums.tobytes()


@pytest.mark.slow
def test_ray_gives_the_same_bits_with_one_actor_and_with_two(
    tmp_path, plain, corpus, monkeypatch
):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # 15 starves beside other tests
    code = (
        "import ray, sys; from pathlib import Path; from regard.atlas.job import run_atlas\n"
        "from regard.atlas.runners import RunnerOptions, start_ray\n"
        "from test_atlas import plan_for\n"
        "start_ray(ray, RunnerOptions(runner='ray', workers=2))\n"  # once for both
        "for n in (1, 2): run_atlas(Path(sys.argv[2]) / str(n), plan=plan_for(sys.argv[1]),"
        " crew=RunnerOptions(runner='ray', workers=n))"
    )
    path = os.pathsep.join([str(HERE), *sys.path])
    subprocess.run(
        [sys.executable, "-c", code, str(corpus), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
        check=True,
        timeout=300,
    )
    check_same(plain, tmp_path / "1")
    check_same(plain, tmp_path / "2")


@pytest.mark.slow
def test_batches_and_pieces_change_only_what_they_say(tmp_path, plain, corpus):
    run_atlas(
        tmp_path / "a",
        crew=RunnerOptions(runner="loop"),
        plan=plan_for(corpus, batch=4),
    )
    one, two = read_table(plain), read_table(tmp_path / "a")
    for name in one.statistics:
        np.testing.assert_allclose(one.mean(name), two.mean(name), atol=1e-6)
    sizes = [len(path.read_text()) for path in corpus.iterdir()]
    length = min(sizes) - 1  # so that a last token stands alone, and is left
    plan = plan_for(corpus, pieces=max(sizes) // length + 1, length=length)
    run_atlas(tmp_path / "b", crew=RunnerOptions(runner="loop"), plan=plan)
    whole = read_table(tmp_path / "b")
    assert whole.about["tokens"] == sum(n - (n % length == 1) for n in sizes)
    assert whole.count("sink")[0, 0] == 40  # pieces are not draws


def test_packed_documents_fill_every_piece_but_the_last_of_a_shard(tmp_path, corpus):
    run_atlas(
        tmp_path, crew=RunnerOptions(runner="loop"), plan=plan_for(corpus, packed=True)
    )
    table, known = read_table(tmp_path), open_corpus(tmp_path / "corpus.parquet")
    sizes = [
        sum(len(Path(place.file).read_bytes()) for place in known.shard(n).places)
        for n in range(known.shards)
    ]
    assert table.about["tokens"] == sum(n - (n % 48 == 1) for n in sizes)
    assert table.count("sink")[0, 0] == sum((n + 46) // 48 for n in sizes)
    assert table.about["documents"] == 40
    names = [x.document for row in table.found.values() for x in row]
    assert any(" … " in name for name in names)  # a piece of two documents


def spoil(folder):
    """Put documents that cannot be done between the others."""
    (folder / "killer.txt").write_text("a KILLER of its process")
    second = "a CRASH of the model, in a batch with others"  # after a good piece
    (folder / "crash.txt").write_text("x" * 48 + f"{second:48}")
    (folder / "unreadable.txt").write_text("UNREADABLE")
    (folder / "short.txt").write_text("x")


@pytest.mark.slow
def test_documents_that_cannot_be_done_are_named_and_the_rest_is_as_without_them(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("regard.atlas.supervisor.LIVES", 2)
    texts = write_corpus(tmp_path / "texts", 12)
    plan = plan_for(texts, batch=4, shard=16, pieces=2)
    run_atlas(tmp_path / "clean", crew=RunnerOptions(runner="loop"), plan=plan)
    spoil(texts)
    run_atlas(tmp_path / "spoiled", crew=RunnerOptions(workers=1), plan=plan)
    table = read_table(tmp_path / "spoiled")
    aside = {name.split("/")[-1]: reason for name, reason in table.about["set_aside"]}
    assert aside == {
        "killer.txt": "it ended its process, again and again",
        "crash.txt": "RuntimeError: a document that breaks the model",
        "unreadable.txt": "ValueError: a text that no tokenizer takes",
        "short.txt": "ValueError: it has fewer than two tokens",
    }
    assert (table.about["documents"], table.about["aside"]) == (12, 4)
    clean = read_table(tmp_path / "clean")
    for name in table.statistics:
        np.testing.assert_allclose(table.mean(name), clean.mean(name), atol=1e-6)


def test_a_document_that_ends_in_nan_is_set_aside_and_not_half_counted(
    tmp_path, monkeypatch
):
    texts = write_corpus(tmp_path / "texts", 12)
    plan = plan_for(texts)
    run_atlas(tmp_path / "clean", crew=RunnerOptions(runner="loop"), plan=plan)
    (texts / "odd.txt").write_text("what comes after \x01 is NaN")
    model = make()
    with torch.no_grad():
        model.network.embed.weight[1] = torch.nan
    monkeypatch.setattr("atlas_model.make", lambda: model)
    run_atlas(tmp_path / "odd", crew=RunnerOptions(runner="loop"), plan=plan)
    table, clean = (read_table(tmp_path / x) for x in ("odd", "clean"))
    ((name, reason),) = table.about["set_aside"]
    assert name.endswith("odd.txt")
    assert reason == "ArithmeticError: NaN in blocks.0.attention"
    assert table.about["reasons"] == {reason: 1}
    assert table.with_nan == 1
    assert {row["nan"] for row in table.list_rows()} == {1}
    columns = pq.read_table(tmp_path / "odd" / "table.parquet").to_pydict()
    assert {*columns["nan"]} == {1}
    assert f"1 document set aside (1: {reason})" in tell_left_out(table.about)
    assert not any("odd.txt" in x.document for row in table.found.values() for x in row)
    for name in table.statistics:
        np.testing.assert_allclose(table.mean(name), clean.mean(name), atol=1e-6)


def test_a_statistic_that_is_nan_is_a_reason_and_no_gap(tmp_path, monkeypatch):
    """A query that sees a key has an entropy: NaN there is not "no number"."""

    def spoil_one(record, tokens, names):
        rows = measure_rows(record, tokens, names)
        if tokens[:3] == tuple(b"odd"):
            values = to_numpy(rows["entropy"].values).copy()
            values[1, 5] = np.nan
            rows["entropy"] = replace(rows["entropy"], values=values)
        return rows

    texts = write_corpus(tmp_path / "texts", 8)
    (texts / "odd.txt").write_text("odd one")
    monkeypatch.setattr("regard.atlas.worker.measure_rows", spoil_one)
    run_atlas(tmp_path / "a", crew=RunnerOptions(runner="loop"), plan=plan_for(texts))
    table = read_table(tmp_path / "a")
    assert (table.with_nan, table.about["aside"]) == (1, 1)
    assert table.count("entropy")[0].tolist() == [8] * 4


def test_a_pack_that_fails_takes_no_half_of_a_document_with_it(tmp_path):
    texts = write_corpus(tmp_path / "texts", 11)
    (texts / "odd.txt").write_text("one CRASH of the model, " + "x" * 100)
    plan = plan_for(texts, packed=True, shard=12)
    run_atlas(tmp_path / "a", crew=RunnerOptions(runner="loop"), plan=plan)
    table = read_table(tmp_path / "a")
    aside = {name for name, _ in table.about["set_aside"]}
    assert any(name.endswith("odd.txt") for name in aside)
    left = tmp_path / "left"
    left.mkdir()
    for path in texts.iterdir():
        if not any(name.endswith(path.name) for name in aside):
            (left / path.name).write_text(path.read_text())
    run_atlas(
        tmp_path / "b",
        crew=RunnerOptions(runner="loop"),
        plan=replace(plan, corpus=(str(left),)),
    )
    clean = read_table(tmp_path / "b")
    assert table.about["documents"] == clean.about["documents"] == 12 - len(aside)
    assert table.about["tokens"] == clean.about["tokens"]
    np.testing.assert_array_equal(table.tally.sums, clean.tally.sums)
    words = [
        [(x.before, x.token, x.after) for x in row]
        for row in (*table.found.values(), *clean.found.values())
    ]
    assert words[: len(words) // 2] == words[len(words) // 2 :]


def test_a_layer_that_runs_twice_is_two_layers(tmp_path, monkeypatch):
    model = make()
    model.network.blocks[1] = model.network.blocks[0]
    monkeypatch.setattr("atlas_model.make", lambda: model)
    plan = plan_for(write_corpus(tmp_path / "texts", 4))
    run_atlas(tmp_path / "a", crew=RunnerOptions(runner="loop"), plan=plan)
    table = read_table(tmp_path / "a")
    assert table.about["set_aside"] == []
    assert [x for x in table.layers if "#" in x] == ["blocks.0.attention#2"]


def test_a_sample_of_a_corpus_says_that_it_is_one(tmp_path, corpus, plain):
    plan = plan_for(corpus, documents=8)
    run_atlas(tmp_path, crew=RunnerOptions(runner="loop"), plan=plan)
    assert not read_table(tmp_path).about["whole"]
    assert read_table(plain).about["whole"]


def is_worker(pid):
    try:
        return (
            b"regard.atlas.worker_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    except OSError:
        return False


@pytest.mark.slow
def test_workers_and_the_driver_may_be_killed_and_nothing_is_lost_or_counted_twice(
    tmp_path, plain, corpus
):
    folder, rng = tmp_path / "atlas", random.Random(0)
    code = (
        "import sys; from regard.atlas.job import run_atlas; from test_atlas import plan_for\n"
        "from regard.atlas.runners import RunnerOptions\n"
        "run_atlas(sys.argv[2], plan=plan_for(sys.argv[1]), crew=RunnerOptions(workers=2))"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    env |= {"ATLAS_SLOW": "0.2", "OMP_NUM_THREADS": "1"}
    killed, drivers, words = 0, 0, (tmp_path / "words").open("w+b")
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        command = [sys.executable, "-c", code, str(corpus), str(folder)]
        driver = subprocess.Popen(command, env=env, stderr=words)
        drivers += 1
        until = time.monotonic() + rng.uniform(12, 18)
        while driver.poll() is None and (killed < 10 or time.monotonic() < until):
            time.sleep(rng.uniform(0.3, 1.5))
            workers = [pid for pid in list_processes(driver.pid)[1:] if is_worker(pid)]
            if workers and killed < 10:
                os.kill(rng.choice(workers), signal.SIGKILL)
                killed += 1
        if drivers > 1:
            driver.wait()
        driver.kill()
        if driver.wait() == 0:
            break
        words.seek(0)
        assert drivers == 1, words.read().decode()
    words.close()
    assert killed == 10
    assert drivers == 2
    check_same(plain, folder)


def test_a_run_that_ended_does_nothing_when_it_is_run_again(tmp_path, plain, corpus):
    before = {x: x.stat().st_mtime_ns for x in (plain / "results").iterdir()}
    begin = time.monotonic()
    standing = run_atlas(plain, crew=RunnerOptions())  # no worker is started
    assert standing.documents == 40
    assert time.monotonic() - begin < 5
    assert before == {x: x.stat().st_mtime_ns for x in (plain / "results").iterdir()}


def test_a_damaged_result_is_done_again(tmp_path, plain, corpus):
    folder = tmp_path / "a"
    run_atlas(folder, crew=RunnerOptions(runner="loop"), plan=plan_for(corpus))
    path = sorted((folder / "results").glob("*.parquet"))[3]
    path.write_bytes(path.read_bytes()[:-7])
    end = run_atlas(folder, crew=RunnerOptions(runner="loop"))
    check_same(plain, folder)
    assert len(list((folder / "results").glob("*.damaged"))) == 1
    assert [path.name in words for words in end.damaged] == [True]


def test_a_full_disk_is_said_and_the_run_goes_on_when_there_is_room(
    tmp_path, plain, corpus
):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk needs the right to mount one")
    try:
        with pytest.raises(FileError, match="is full"):
            run_atlas(small, crew=RunnerOptions(runner="loop"), plan=plan_for(corpus))
        kept = len(list((small / "results").glob("0-*.parquet")))
        assert 0 < kept < 10
        assert not list((small / "results").glob("*.new"))  # nothing half written
        subprocess.run(["mount", "-o", "remount,size=4m", str(small)], check=True)
        run_atlas(small, crew=RunnerOptions(runner="loop"))
        check_same(plain, small)
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_said_with_its_last_words(
    tmp_path, corpus, monkeypatch
):
    monkeypatch.setattr("regard.atlas.supervisor.STARTS", 2)
    plan = Settings(model="atlas_model:never", corpus=(str(corpus),))
    known = open_corpus_for(tmp_path, corpus)
    with (
        Supervisor(plan) as guard,
        pytest.raises(RegardError, match="no memory for this"),
    ):
        guard.run(known.shard(0))


def open_corpus_for(folder, corpus):
    return plan_corpus([corpus], folder / "corpus.parquet")


@pytest.mark.slow
def test_a_document_whose_process_dies_twice_is_unlucky_and_not_guilty(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("ATLAS_DEATHS", str(tmp_path))
    texts = write_corpus(tmp_path / "texts", 1)
    (texts / "unlucky.txt").write_text("UNLUCKY, but nobody's fault")
    run_atlas(tmp_path / "atlas", crew=RunnerOptions(workers=1), plan=plan_for(texts))
    about = read_table(tmp_path / "atlas").about
    assert (about["documents"], about["aside"]) == (2, 0)
    assert len(list(tmp_path.glob("*.death"))) == 2


def test_who_was_stopped_starts_no_process(corpus, plain):
    with Supervisor(plan_for(corpus)) as guard:
        guard.cancel()
        with pytest.raises(RegardError, match="the work was stopped"):
            guard.run(open_corpus(plain / "corpus.parquet").shard(0))
        assert guard.child is None


@pytest.mark.slow
def test_documents_that_all_end_their_process_are_not_blamed(tmp_path, monkeypatch):
    monkeypatch.setattr("regard.atlas.supervisor.LIVES", 1)
    for i in range(2):
        (tmp_path / f"{i}.txt").write_text(f"KILLER {i}")
    known = open_corpus_for(tmp_path, tmp_path)
    with (
        Supervisor(plan_for(tmp_path)) as guard,
        pytest.raises(RegardError, match="not the documents"),
    ):
        guard.run(known.shard(0))


@pytest.mark.slow
def test_it_stops_after_the_first_shard_at_which_enough_is_known(tmp_path, corpus):
    rule = plan_for(corpus, statistics=("sink", "local"), until_interval=0.3)
    ends = []
    for name, crew in (
        ("a", RunnerOptions(runner="loop")),
        ("b", RunnerOptions(workers=2)),
    ):
        ends.append(run_atlas(tmp_path / name, crew=crew, plan=rule))
    assert ends[0] == ends[1]
    assert 0 < ends[0].shards < ends[0].of
    assert "± 0.3" in ends[0].ended
    check_same(tmp_path / "a", tmp_path / "b")
    store = Store(tmp_path / "a" / "results", keep=2)
    while store.first_missing < ends[0].shards - 1:
        store.fold()
    assert find_widest(store.total(), rule)[0] > 0.3  # one shard before
    table = read_table(tmp_path / "a")
    assert max(table.half(x).max() for x in ("sink", "local")) <= 0.3
    assert table.half("sink").min() > 2 * table.tally.half().max()  # not of Student
    assert table.interval == "sequence"
    columns = pq.read_table(tmp_path / "a" / "table.parquet").to_pydict()
    halves = np.concatenate([table.half(x).ravel() for x in ("sink", "local")])
    np.testing.assert_array_equal(columns["half"], halves)
    assert {*columns["interval"]} == {"sequence"}
    assert not table.about["whole"]
    again = run_atlas(tmp_path / "a", crew=RunnerOptions(runner="loop"))
    assert replace(again, damaged=()) == ends[0]
    check_same(tmp_path / "a", tmp_path / "b")


def test_results_that_are_already_there_are_counted_one_shard_at_a_time(
    tmp_path, plain, corpus
):
    """A pool may bring later shards first: they do not count once enough is known."""
    shutil.copytree(plain, tmp_path / "copy")
    asked = plan_for(corpus, tokens=1)
    end = run_atlas(tmp_path / "copy", crew=RunnerOptions(runner="loop"), plan=asked)
    assert (end.shards, end.of) == (1, 10)
    assert end.ended == "1 tokens were asked for"


def test_a_run_that_ends_too_early_says_what_is_missing(tmp_path, corpus):
    rule = plan_for(corpus, statistics=("sink",), tokens=500, until_interval=0.05)
    end = run_atlas(tmp_path, crew=RunnerOptions(runner="loop"), plan=rule)
    assert end.ended.startswith("500 tokens were asked for; the widest interval of")
    assert "± 0.05 for every head would take about" in end.ended
    needed = int(re.search(r"about ([\d,]+) documents", end.ended)[1].replace(",", ""))
    assert end.documents < needed < 400
    assert read_table(tmp_path).interval == "sequence"
    # it was looked at before it went on: the kind of its interval stays
    plain = plan_for(corpus, statistics=("sink",))
    end = run_atlas(tmp_path, crew=RunnerOptions(runner="loop"), plan=plain)
    assert end.ended == "every document was read"
    table = read_table(tmp_path)
    assert table.interval == "sequence"
    assert table.half("sink").min() > table.tally.half().max()


def test_a_folder_of_an_earlier_version_has_the_interval_of_its_plan(tmp_path, corpus):
    for name, rule in (("fixed", None), ("stopped", 0.3)):
        folder = tmp_path / name
        plan = plan_for(corpus, statistics=("sink",), until_interval=rule)
        run_atlas(folder, crew=RunnerOptions(runner="loop"), plan=plan)
        table = read_table(folder)
        about = json.loads((folder / "about.json").read_text())
        assert about.pop("interval") == table.interval
        (folder / "about.json").write_text(json.dumps(about))
        old = {k: v for k, v in table.about.items() if k not in ("interval", "reasons")}
        (folder / "table.parquet").write_bytes(encode_result(table.tally, old))
        found = read_table(folder)
        assert found.interval == ("student" if rule is None else "sequence")
        np.testing.assert_array_equal(found.half("sink"), table.half("sink"))
        (folder / "about.json").unlink()
        with pytest.raises(FileError, match="not known whether the run had a stopping"):
            read_table(folder)


def test_documents_set_aside_by_earlier_versions_are_counted():
    old = Result(0, 1, tally_nothing(("sink",)), 8, 99, 3, (("d", "n", "why"),) * 2)
    new = replace(old, first=1, last=2, n_aside=1, aside=(), reasons={"why": 1})
    assert merge_results([old, new], keep=1).reasons == {"why": 3, "other reasons": 1}


def test_it_stops_after_so_many_tokens(tmp_path, corpus):
    end = run_atlas(
        tmp_path, crew=RunnerOptions(runner="loop"), plan=plan_for(corpus, tokens=500)
    )
    assert end.tokens >= 500
    assert end.shards < end.of
    more = run_atlas(tmp_path, crew=RunnerOptions(runner="loop"), plan=plan_for(corpus))
    assert more.shards == more.of  # without the rule it goes on
    again = run_atlas(
        tmp_path, crew=RunnerOptions(runner="loop")
    )  # and does not go back to it
    assert again.shards == again.of
    assert read_table(tmp_path).about["whole"]


def test_a_folder_of_another_plan_is_refused(tmp_path, plain, corpus):
    for length in (32, 60):
        with pytest.raises(OptionError, match=f"length=48, given {length}"):
            run_atlas(plain, crew=RunnerOptions(), plan=plan_for(corpus, length=length))
    with pytest.raises(FileError, match="holds no atlas"):
        run_atlas(tmp_path / "nothing", crew=RunnerOptions())


def test_two_runs_do_not_work_in_one_folder(tmp_path, plain):
    with lock(plain), pytest.raises(OptionError, match="another run"):
        run_atlas(plain, crew=RunnerOptions())


@pytest.mark.slow
def test_ctrl_c_ends_the_workers_and_keeps_what_was_done(tmp_path, corpus, monkeypatch):
    monkeypatch.setenv("ATLAS_SLOW", "0.2")
    seen = []

    def interrupt(standing):
        seen.append(standing.shards)
        if standing.shards >= 2:
            raise KeyboardInterrupt

    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run_atlas(
            tmp_path,
            crew=RunnerOptions(workers=2),
            plan=plan_for(corpus),
            progress=interrupt,
        )
    assert not [pid for pid in list_processes(os.getpid())[1:] if is_worker(pid)]
    assert threading.active_count() == threads
    assert len(list((tmp_path / "results").glob("0-*"))) >= 2


def test_an_example_is_recorded_again_and_the_map_opens_there(tmp_path, plain):
    table = read_table(plain)
    example = table.examples("previous", 1, 2)[1]
    seen = record_example(plain, Place(statistic="previous", layer=1, head=2, rank=1))
    weights = seen.layer(1).weights(heads=slice(2, 3))[0]
    at = example.position
    assert float(weights[at, at - 1]) == pytest.approx(example.value, rel=1e-5)
    assert seen.recording.notes["address"] == f"l=1&h=2&pin={at}"
    texts = seen.recording.texts[0]
    assert texts[at] == example.token
    assert "".join(texts[max(0, at - 24) : at]) == example.before
    with pytest.raises(OptionError, match="not one of the 2 examples"):
        record_example(plain, Place(statistic="previous", layer=1, head=2, rank=2))


def test_halves_of_one_corpus_do_not_differ_and_another_one_does(tmp_path):
    for name, words in (("a", WORDS), ("b", WORDS), ("c", ["00 11", "{}", "= 0;"])):
        rng = random.Random(name)
        (tmp_path / name).mkdir()
        for i in range(24):
            text = " ".join(rng.choices(words, k=20))
            (tmp_path / name / f"{i}.txt").write_text(text)
        plan = plan_for(tmp_path / name, shard=12, statistics=("entropy",))
        run_atlas(
            tmp_path / f"{name}.atlas", crew=RunnerOptions(runner="loop"), plan=plan
        )
    a, b, c = (read_table(tmp_path / f"{name}.atlas") for name in "abc")
    assert not compare_atlases(a, b, "entropy").marked.any()
    other = compare_atlases(a, c, "entropy")
    size = np.abs(other.difference)
    half = np.hypot(a.half("entropy"), c.half("entropy"))
    wide = np.hypot(a.half("entropy", 1 - 0.05 / 8), c.half("entropy", 1 - 0.05 / 8))
    np.testing.assert_allclose(other.half, half)
    np.testing.assert_allclose(other.difference, c.mean("entropy") - a.mean("entropy"))
    np.testing.assert_array_equal(other.marked, size > wide)
    assert other.marked.any()
    assert (other.alone, other.chance) == ((size > half).sum(), pytest.approx(0.4))


def test_a_plan_is_read_from_a_small_file(tmp_path):
    (tmp_path / "texts").mkdir()
    file = tmp_path / "plan.toml"
    file.write_text(
        'model = "m:f"\ncorpus = "texts"\nstatistics = ["sink"]\nuntil_interval = 0.01\n'
    )
    plan = read_plan(file)
    assert plan.corpus == (str(tmp_path / "texts"),)
    assert (plan.statistics, plan.until_interval) == (("sink",), 0.01)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"length": 1}, "one token sees only itself"),
        ({"length": True}, "length=True, expected a whole number"),
        ({"shard": 0}, "shard=0"),
        ({"statistics": ["sink", "sink"]}, "each once"),
        ({"statistics": ["beauty"]}, "'beauty'"),
        ({"statistics": []}, "none"),
        ({"precision": "int8"}, "float32, bfloat16"),
        ({"until_interval": 2.0}, "between 0 and 1"),
        ({"until_interval": 0.1, "packed": True}, "not independent draws"),
        (
            {"until_interval": 0.1, "statistics": ("entropy", "logit")},
            "is for mean weights, expected one of sink, previous",
        ),
        ({"corpus": []}, "needs a corpus"),
        ({"corpus": 3}, "expected a list"),
        ({"colour": "red"}, "no option 'colour'"),
        ({"packed": "yes"}, "true or false"),
        ({"tokens": -1}, "tokens=-1"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(given, words):
    with pytest.raises(OptionError, match=words):
        make_settings({"model": "m:f", "corpus": ["x"]} | given)


def test_a_crew_that_cannot_work_is_refused():
    for given, words in (
        ({"runner": "spark"}, "expected one of loop, pool, ray"),
        ({"workers": 0}, "1 or more"),
        ({"address": "auto"}, "for Ray"),
    ):
        with pytest.raises(OptionError, match=words):
            RunnerOptions(**given)
