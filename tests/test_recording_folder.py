"""The folder of a server's recordings: bounded, complete, and safe from its clients."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import regard
from regard.__main__ import main
from regard.errors import FileError, RegardError
from regard.recording.evidence import Covered
from regard.recording.file import open_recording
from regard.recording.folder import (
    LEFT,
    RecordingFolder,
    clean_file_name,
    measure,
    read_limits,
)
from regard.recording.record import Record, Recording


def make_recording(n=4, rank=(0, 1), heads=2, seed=0):
    rng = np.random.default_rng([seed, rank[0]])
    q, k = (rng.normal(size=(heads, n, 8)).astype(np.float32) for _ in range(2))
    scores = np.where(np.tri(n, dtype=bool), q @ k.swapaxes(1, 2), -np.inf)
    record = Record(
        name="a.0",
        q=q,
        k=k,
        lse=np.log(np.exp(scores).sum(-1)),
        scale=1.0,
        q_positions=np.arange(n),
        k_positions=np.arange(n),
        mask=regard.causal(),
    )
    return Recording(
        model="Small",
        records=(record,),
        sequences=(0,),
        tokens=(tuple(range(n)),),
        texts=(tuple(f"w{i}" for i in range(n)),),
        coverage=(Covered(name="a.0", via="vllm", calls=1, kept=1),),
        notes={"rank": list(rank), "requests": ["x"], "decoders": ["a.0"]},
    )


@pytest.fixture
def folder(tmp_path):
    made = RecordingFolder(path=tmp_path / "r")
    made.make()
    return made


def list_names(folder):
    return sorted(x.name for x in folder.path.iterdir() if x.name != ".lock")


def test_a_recording_comes_back_and_only_its_owner_may_read_it(folder):
    path = folder.save("chatcmpl-1-abc", make_recording())
    assert path == folder.path / "chatcmpl-1-abc.regard"
    assert oct(folder.path.stat().st_mode)[-3:] == "700"
    assert oct(path.stat().st_mode)[-3:] == "600"
    assert open_recording(path, verify=True).tokens == ((0, 1, 2, 3),)
    assert regard.open(path).recording.texts[0][2] == "w2"


HOSTILE = ["../../etc/passwd", "/etc/passwd", "..", ".", "", "-rf", "a" * 5000, "a\0b"]
HOSTILE += ["a\n\x1b[31m", "CON/aux", "𓀀" * 300, "a/../../b", "~root", ".lock", "x.new"]


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_no_name_leaves_the_folder(folder, name):
    path = folder.save(name, make_recording())
    assert path.parent == folder.path
    assert path.resolve().parent == folder.path.resolve()
    assert len(path.name.encode()) <= 255
    assert path.name.removesuffix(".regard").replace("_", "").replace("-", "").isalnum()
    assert list_names(folder) == [path.name]


def test_the_end_of_a_long_name_is_kept_because_it_makes_it_unique():
    assert clean_file_name("x" * 500 + "-1a2b3c4d").endswith("-1a2b3c4d")


def test_nothing_is_replaced(folder):
    path = folder.save("same", make_recording(seed=1))
    before = path.read_bytes()
    with pytest.raises(FileError, match=r"same\.regard exists already"):
        folder.save("same", make_recording(seed=2))
    assert path.read_bytes() == before
    assert list_names(folder) == ["same.regard"]


def test_heads_are_joined_when_the_last_rank_has_written(folder):
    parts = [make_recording(rank=(i, 3)) for i in range(3)]
    assert folder.save("x", parts[2]) is None
    assert folder.save("x", parts[0]) is None
    assert folder.list_recordings() == []
    path = folder.save("x", parts[1])
    assert list_names(folder) == ["x.regard"]
    found = open_recording(path).records[0].q
    np.testing.assert_array_equal(
        found, np.concatenate([part.records[0].q for part in parts])
    )


def test_parts_that_cannot_be_joined_are_not_kept(folder):
    folder.save("x", make_recording(n=4, rank=(0, 2)))
    with pytest.raises(RegardError, match="other tokens"):
        folder.save("x", make_recording(n=5, rank=(1, 2)))
    assert list_names(folder) == []


def test_the_number_of_files_is_bounded(tmp_path):
    folder = RecordingFolder(path=tmp_path, max_files=3)
    refused = 0
    for i in range(10_000):
        try:
            folder.save(f"r{i}", make_recording())
        except FileError:
            refused += 1
    assert refused == 10_000 - 3
    assert list_names(folder) == ["r0.regard", "r1.regard", "r2.regard"]


def test_the_bytes_are_bounded_and_measured_before_anything_is_written(tmp_path):
    one = measure(make_recording())
    folder = RecordingFolder(path=tmp_path, max_bytes=one + one // 2)
    size = folder.save("a", make_recording()).stat().st_size
    assert 0 < size <= one
    with pytest.raises(FileError, match=r"does not fit.*--prune"):
        folder.save("b", make_recording(n=400))
    used = sum(x.stat().st_size for x in tmp_path.iterdir())
    assert used <= folder.max_bytes
    assert list_names(folder) == ["a.regard"]


@pytest.mark.parametrize("n", [1, 50, 3000])
def test_a_file_is_never_larger_than_it_was_measured(folder, n):
    recording = replace(make_recording(n=n), texts=(("\x00" * 40,) * n,))
    assert folder.save("a", recording).stat().st_size <= measure(recording)


def test_what_killed_processes_left_is_deleted_and_the_parts_of_others_are_not(folder):
    for name in ("a.regard.99.new", "b.rank0of2.part", "c.rank0of2.part"):
        (folder.path / name).write_bytes(b"half")
    old = time.time() - LEFT - 1
    os.utime(folder.path / "b.rank0of2.part", (old, old))
    folder.save("d", make_recording())
    assert list_names(folder) == ["c.rank0of2.part", "d.regard"]


WRITER = """
import sys; sys.path.insert(0, sys.argv[2])
from test_recording_folder import make_recording, RecordingFolder, Path
folder = RecordingFolder(path=Path(sys.argv[1]), max_files=10_000)
recordings = [make_recording(n=2_000, seed=i) for i in range(3)]
print("ready", flush=True)
for i in range(10_000):
    folder.save(f"p{sys.argv[3]}-{i}", recordings[i % 3])
"""


@pytest.mark.slow
def test_every_recording_is_complete_when_its_writers_are_killed(folder):
    here = str(Path(__file__).parent)
    for turn in range(3):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, folder.path, here, f"{turn}{i}"],
                stdout=subprocess.PIPE,
            )
            for i in range(2)
        ]
        for writer in writers:
            assert writer.stdout.readline() == b"ready\n"
        time.sleep(0.3 + 0.05 * turn)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
    found = folder.list_recordings()
    assert len(found) > 6
    for saved in found:
        assert open_recording(saved.path, verify=True).records[0].q.shape[1] == 2_000
    folder.save("after", make_recording())  # nobody holds the lock
    assert all(x.endswith(".regard") for x in list_names(folder))


def test_the_command_lists_and_prunes(folder):
    for i in range(5):
        path = folder.save(f"r{i}", make_recording())
        os.utime(path, (1_000_000 + i, 1_000_000 + i))
    run = CliRunner().invoke
    shown = run(main, ["recordings", str(folder.path)]).output.splitlines()
    assert [x.split()[-1] for x in shown[:-1]] == [f"r{i}.regard" for i in range(5)][
        ::-1
    ]
    assert shown[-1].startswith("5 recordings, ")
    done = run(main, ["recordings", str(folder.path), "--prune", "2"])
    assert done.output.startswith("deleted 3 recordings, ")
    assert list_names(folder) == ["r3.regard", "r4.regard"]
    shown = run(main, ["recordings", str(folder.path), "--json"]).output
    assert '"name": "r4.regard"' in shown


def test_limits_are_read_from_words():
    found = read_limits("x", "7", "")
    assert (found.max_files, found.max_bytes) == (
        7,
        RecordingFolder(path="x").max_bytes,
    )
    with pytest.raises(RegardError, match="expected whole numbers"):
        read_limits("x", "many", "")
