"""A corpus: every document once, in one order, found again, whatever the files are."""

import contextlib
import json
import os
import pickle
import shutil
import socket
import tempfile
import tracemalloc
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.atlas import corpus_files as sources
from regard.atlas.corpus import (
    CHANGED,
    Document,
    open_corpus,
    plan_corpus,
    read_shard,
)
from regard.errors import FileError, OptionError

# Files, written as others write them


def write_texts(folder, texts):
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_bytes(text.encode())
    return folder


def write_lines(folder, texts):
    path = folder / "a.jsonl"
    lines = [
        json.dumps({"n": i, "text": text}, ensure_ascii=i % 2 == 0)
        for i, text in enumerate(texts)
    ]
    path.write_text("\n".join(lines), "utf-8")
    return path


def write_parquet(folder, texts, rows=3, kind=pa.string):
    path = folder / "a.parquet"
    table = pa.table({"n": range(len(texts)), "text": pa.array(texts, kind())})
    pq.write_table(table, path, row_group_size=rows)
    return path


def write_arrow(folder, texts, rows=3, new=pa.ipc.new_stream, name="a.arrow"):
    table = pa.table({"text": pa.array(texts, pa.string()), "n": range(len(texts))})
    with new(folder / name, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return folder / name


def write_arrow_file(folder, texts):
    return write_arrow(folder, texts, new=pa.ipc.new_file)


def write_dataset(folder, texts):
    """Write the files of datasets.save_to_disk(num_shards=2), seen with datasets 5.2."""
    folder = folder / "saved"
    folder.mkdir()
    half = len(texts) // 2
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (texts[:half], texts[half:]), strict=True):
        write_arrow(folder, part, name=name)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text('{"features": {}}')
    write_arrow(folder, ["left by an earlier save"], name="data-00000-of-00001.arrow")
    return folder


KINDS = (
    write_texts,
    write_lines,
    write_parquet,
    write_arrow,
    write_arrow_file,
    write_dataset,
)


def read_all(corpus):
    return [x for i in range(corpus.shards) for x in read_shard(corpus.shard(i))]


def plan(tmp_path, *paths, **options):
    return plan_corpus(paths, tmp_path / "manifest.parquet", **options)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "corpus").mkdir()
    return tmp_path / "corpus"


# Every document once


plain = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff"), max_size=20
)
lists = st.lists(plain | st.sampled_from(["a", "b\r\n", "", " \n"]), max_size=12)


@settings(max_examples=30)
@given(lists, st.integers(1, 5), st.permutations(KINDS))
def test_any_list_of_texts_comes_back_once_in_one_order_from_any_files(
    texts, size, kinds
):
    different = {text for text in texts if text.strip()}
    expected = sorted(
        (blake2b(text.encode(), digest_size=16).hexdigest(), text) for text in different
    )
    seen = set()
    for kind in kinds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            source = folder / "source"
            source.mkdir()
            written = kind(source, texts)
            if not different:
                with pytest.raises(FileError, match="no documents in"):
                    plan(folder, written)
                continue
            corpus = plan(folder, written, shard=size)
            found = read_all(corpus)
            assert [(x.digest, x.text) for x in found] == expected
            assert len(corpus) == corpus.different == len(expected)
            blank = sum(not text.strip() for text in texts)
            assert corpus.copies == len(texts) - blank - len(expected)
            assert sum(corpus.counts.values()) == blank
            cut = tuple(len(corpus.shard(i).places) for i in range(corpus.shards))
            assert all(n == size for n in cut[:-1])
            seen.add((corpus.digest, cut))
    assert len(seen) <= 1  # the same shards, whatever the kind


@settings(max_examples=30)
@given(st.lists(plain.filter(str.strip), min_size=1, max_size=12), st.randoms())
def test_the_manifest_does_not_depend_on_the_order_of_files(texts, random):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = []
        for i, text in enumerate(texts):
            below = folder / "in" / str(i)
            below.mkdir(parents=True)
            paths.append(random.choice(KINDS[:5])(below, [text, "a copy"]))
        first = plan_corpus(paths, folder / "first", shard=2)
        random.shuffle(paths)
        second = plan_corpus([*paths, paths[0]], folder / "second", shard=2)
        assert (folder / "first").read_bytes() == (folder / "second").read_bytes()
        assert first.digest == second.digest
        assert second.copies == 2 * len(texts) - len({*texts, "a copy"})


def test_a_text_beyond_the_basic_plane_and_odd_controls_come_back_from_lines(
    tmp_path, folder
):
    texts = ["\ufeffmark", "a\0b", "a\u2028b\x85c\x0b", "\U0001f600", "\x1b[2J"]
    corpus = plan(tmp_path, write_lines(folder, texts))
    assert {x.text for x in read_all(corpus)} == set(texts)


def test_names_say_where_a_document_stands(tmp_path, folder):
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("one")
    (folder / "b.ndjson").write_text('\n{"text": "two"}\r\n\n{"text": "three"}')
    write_parquet(folder, ["four", "five"])
    corpus = plan(tmp_path, folder)
    names = {x.text: x.name for x in read_all(corpus)}
    assert names == {
        "one": "corpus/notes/a.txt",
        "two": "corpus/b.ndjson:2",
        "three": "corpus/b.ndjson:4",
        "four": "corpus/a.parquet:0",
        "five": "corpus/a.parquet:1",
    }
    places = [x for i in range(corpus.shards) for x in corpus.shard(i).places]
    at = {Path(x.file).name + ":" + str(x.at) for x in places}
    assert {"b.ndjson:1", "b.ndjson:19", "a.parquet:1", "a.txt:0"} <= at
    assert all(Path(x.file).is_absolute() for x in places)
    assert not corpus.counts


def test_the_first_documents_are_those_of_the_whole(tmp_path, folder):
    path = write_lines(folder, [f"document {i}" for i in range(100)])
    whole = [x.text for x in read_all(plan(tmp_path, path))]
    corpus = plan(tmp_path, path, documents=37, shard=10)
    assert [x.text for x in read_all(corpus)] == whole[:37]
    assert (len(corpus), corpus.shards, corpus.different) == (37, 4, 100)
    assert len(plan(tmp_path, path, documents=1000)) == 100


def test_a_copy_is_counted_and_the_first_path_is_kept(tmp_path, folder):
    for name in ("c.txt", "b.txt", "a.md"):
        (folder / name).write_text("the same")
    os.link(folder / "c.txt", folder / "d.txt")  # the same file, read once
    (folder / "e.txt").symlink_to("b.txt")
    corpus = plan(tmp_path, folder)
    assert corpus.copies == 2
    assert [x.name for x in read_all(corpus)] == ["corpus/a.md"]


def test_a_shard_is_small_and_travels_without_its_texts(tmp_path, folder):
    path = write_lines(folder, [f"secret {i} " * 1000 for i in range(32)])
    shard = plan(tmp_path, path).shard(0)
    raw = pickle.dumps(shard)
    assert b"secret" not in raw
    assert len(raw) < 5000
    assert len(list(read_shard(pickle.loads(raw)))) == 32


def test_every_shard_of_many_row_groups_is_read(tmp_path, folder):
    texts = [f"document {i}" for i in range(10_000)]
    corpus = plan(tmp_path, write_parquet(folder, texts, rows=700), shard=48)
    assert corpus.table.num_row_groups == 3
    assert sorted(x.text for x in read_all(corpus)) == sorted(texts)
    numbers = [corpus.shard(i).number for i in range(corpus.shards)]
    assert numbers == list(range(209))
    assert len(corpus.shard(208).places) == 10_000 - 208 * 48


def test_a_shard_reads_no_row_group_twice_and_none_for_nothing(tmp_path, folder):
    path = write_parquet(folder, [f"document {i}" for i in range(30)], rows=5)
    shard = plan(tmp_path, path, shard=30).shard(0)
    first, last = (x for x in shard.places if x.at in (3, 29))
    rows = sorted((first.at, last.at))
    cut = [at for at, *_ in sources.read_parquet(str(path), "text", rows)]
    assert cut == [0, 25]
    everything = sources.read_parquet(str(path), "text", list(range(30)))
    assert [at for at, *_ in everything] == [0, 5, 10, 15, 20, 25]


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_string,
        pa.string_view,
        pa.binary,
        pa.large_binary,
        lambda: pa.dictionary(pa.int8(), pa.string()),
    ],
)
def test_texts_of_every_type_are_read(tmp_path, folder, kind):
    corpus = plan(tmp_path, write_parquet(folder, ["é", None, "b"], kind=kind))
    assert {x.text for x in read_all(corpus)} == {"é", "b"}
    assert corpus.left_out == (("a.parquet:1", "it has no field 'text'"),)


def test_another_field_is_read_and_remembered(tmp_path, folder):
    (folder / "a.jsonl").write_text('{"text": 1, "a.b": "yes"}\n{"text": "no"}')
    pq.write_table(pa.table({"a.b": ["also"]}), folder / "b.parquet")
    corpus = plan(tmp_path, folder, field="a.b")
    assert {x.text for x in read_all(open_corpus(corpus.manifest))} == {"yes", "also"}
    assert corpus.counts == {"it has no field 'a.b'": 1}


def test_a_dictionary_of_datasets_is_read_without_what_describes_it(tmp_path, folder):
    (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (folder / "train").mkdir()
    write_dataset(folder / "train", ["a", "b", "c"]).rename(folder / "test")
    corpus = plan(tmp_path, folder)
    assert {x.text for x in read_all(corpus)} == {"a", "b", "c"}
    assert not corpus.counts


# What is left out


LINES = {
    b'{"text": "good"}': None,
    b'{"text": "good", "n": 1e999}': None,  # a copy
    b'{"text": "big", "n": ' + b"9" * 5000 + b"}": None,
    b'{"text": "bad"': "it is no JSON",
    b"[" * 100_000: "it is no JSON",
    b'{"text": "bad", "n": NaN}': "it is no JSON",
    b'{"text": "bad", "n": -Infinity}': "it is no JSON",
    b'{"text": "bad"} {"text": "bad"}': "it is no JSON",
    b'["text"]': "it has no field 'text'",
    b'"text"': "it has no field 'text'",
    b'{"Text": "bad"}': "it has no field 'text'",
    b'{"text": null}': "its field 'text' is no text",
    b'{"text": 3}': "its field 'text' is no text",
    b'{"text": ["bad"]}': "its field 'text' is no text",
    b'{"text": "bad \\ud800"}': "it holds half of a surrogate pair",
    b'{"text": "good \\ud83d\\ude00"}': None,
    b'{"text": "bad \xff"}': "it is no UTF-8 text",
    b'{"text": "bad \xed\xa0\x80"}': "it is no UTF-8 text",
    b'{"text": " \\t"}': "it is empty, or white space alone",
    b'\xef\xbb\xbf{"text": "bad"}': "it is no JSON",  # a mark, not at the beginning
}


def test_bad_lines_are_left_out_with_their_reasons(tmp_path, folder):
    path = folder / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(LINES) + b"\r\n")
    corpus = plan(tmp_path, path)
    expected = [
        (f"a.jsonl:{i}", reason)
        for i, reason in enumerate(LINES.values(), start=1)
        if reason
    ]
    assert corpus.left_out == tuple(expected)
    assert sum(corpus.counts.values()) == len(expected)
    assert corpus.counts["it is no JSON"] == 6
    assert corpus.copies == 1
    assert {x.text for x in read_all(corpus)} == {"good", "big", "good \U0001f600"}


def test_a_line_of_fifty_megabytes_is_read_and_a_longer_one_is_named(
    tmp_path, folder, monkeypatch
):
    path = folder / "a.jsonl"
    with path.open("w") as file:
        for n in (50_000_000, 70_000_000, 1):
            file.write('{"text": "' + "a" * n + '"}\n')
    (folder / "b.txt").write_text("b" * 70_000_000)
    corpus = plan(tmp_path, folder)
    assert sorted(len(x.text) for x in read_all(corpus)) == [1, 50_000_000]
    assert corpus.left_out == (
        ("corpus/a.jsonl:2", sources.TOO_LONG),
        ("corpus/b.txt", sources.TOO_LONG),
    )
    monkeypatch.setattr(sources, "LONGEST", 20)  # at the very edge
    path.write_text("".join('{"text": "%s"}\n' % ("a" * n) for n in (7, 8, 40, 3)))
    (folder / "b.txt").write_bytes(b"\xef\xbb\xbf" + b"b" * 20)
    (folder / "c.txt").write_bytes(b"c" * 21)
    write_parquet(folder, ["d" * 20, "d" * 21])
    corpus = plan(tmp_path, folder)
    texts = {x.text for x in read_all(corpus)}
    assert texts == {"a" * 7, "a" * 3, "b" * 20, "d" * 20}
    assert [name for name, _ in corpus.left_out] == [
        "corpus/a.jsonl:2",
        "corpus/a.jsonl:3",
        "corpus/a.parquet:1",
        "corpus/c.txt",
    ]


def test_files_that_hold_no_documents_are_named(tmp_path, folder):
    (folder / "good.txt").write_text("good")
    (folder / "late.txt").write_bytes(b"a" * 9000 + b"\0")  # NUL is a character
    (folder / "mark.txt").write_bytes(b"\xef\xbb\xbfmarked")
    (folder / ".hidden").write_text("hidden")
    (folder / ".git").mkdir()
    (folder / ".git" / "x.txt").write_text("hidden as well")
    (folder / "a.jsonl.gz").write_bytes(b"\x1f\x8b")
    (folder / "b.bin").write_bytes(b"\x7fELF\0")
    (folder / "c.txt").write_bytes(b"caf\xe9")
    (folder / "d.parquet").write_bytes(b"PAR1 no, not at all PAR1")
    (folder / "e.parquet").write_bytes(b"")
    (folder / "f.arrow").write_bytes(b"")
    (folder / "g.arrow").write_bytes(b"ARROW1 no, not at all")
    (folder / "h.arrow").write_bytes(b"\xff\xff\xff\xff\xff\xff\xff\x7f no")
    pq.write_table(pa.table({"words": ["bad"]}), folder / "i.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), folder / "j.PARQUET")
    (folder / "k").mkdir()
    (folder / "l.jsonl").write_bytes(b"")  # no lines: nothing to name
    corpus = plan(tmp_path, folder)
    assert {x.text for x in read_all(corpus)} == {"good", "a" * 9000 + "\0", "marked"}
    assert dict(corpus.left_out) == {
        "corpus/a.jsonl.gz": "it is compressed (.gz), unpack it first",
        "corpus/b.bin": "it is binary, or text in UTF-16",
        "corpus/c.txt": "it is no UTF-8 text",
        **dict.fromkeys(
            ("corpus/d.parquet", "corpus/e.parquet", "corpus/f.arrow"), sources.DAMAGED
        ),
        **dict.fromkeys(("corpus/g.arrow", "corpus/h.arrow"), sources.DAMAGED),
        "corpus/i.parquet": "it has no column 'text'",
        "corpus/j.PARQUET": "its column 'text' holds no texts",
    }


def test_links_pipes_and_folders_that_cannot_be_read_are_named(tmp_path, folder):
    (folder / "good.txt").write_text("good")
    (folder / "loop").symlink_to(folder)
    (folder / "self.txt").symlink_to("self.txt")
    (folder / "nowhere.txt").symlink_to("missing")
    os.mkfifo(folder / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(folder):
        server.bind("socket")
        corpus = plan(tmp_path, folder)
    assert [x.text for x in read_all(corpus)] == ["good"]
    assert dict(corpus.left_out) == {
        "corpus/loop": "it is a link to a folder, give that folder itself",
        "corpus/nowhere.txt": "it cannot be read: No such file or directory",
        "corpus/pipe.txt": "it is no ordinary file",
        "corpus/self.txt": "it cannot be read: Too many levels of symbolic links",
        "corpus/socket": "it is no ordinary file",
    }
    link = tmp_path / "given"
    link.symlink_to(folder)
    assert plan(tmp_path, link).digest == corpus.digest  # a link that is asked for


@contextlib.contextmanager
def as_nobody():
    """Give up the rights of root, who may read everything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_what_may_not_be_read_is_named():
    folder = Path(tempfile.mkdtemp())  # not below folders of root
    try:
        folder.chmod(0o777)
        below = folder / "in"
        (below / "closed").mkdir(parents=True)
        (below / "a.txt").write_text("good")
        for name in ("b.txt", "b.jsonl", "b.parquet", "b.arrow"):
            (below / name).write_text("closed")
            (below / name).chmod(0)
        (below / "closed").chmod(0)
        with as_nobody():
            corpus = plan(folder, below)
            assert [x.text for x in read_all(corpus)] == ["good"]
            assert corpus.counts == {"it cannot be read: Permission denied": 5}
    finally:
        (below / "closed").chmod(0o700)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "name",
    ["a\nb.txt", "\x1b[2J.txt", "\u202etxt.exe", "<script>.txt", os.fsdecode(b"\xff")],
)
def test_hostile_names_are_read_and_safe_to_print(tmp_path, folder, name):
    (folder / name).write_text("good")
    (folder / (name + ".bin")).write_bytes(b"\0")
    corpus = open_corpus(plan(tmp_path, folder).manifest)
    (document,) = read_all(corpus)
    assert document.text == "good"
    assert corpus.shard(0).places[0].file == str(folder / name)
    for shown in (document.name, corpus.left_out[0][0]):
        assert shown.isprintable()
        shown.encode()  # no half of a pair
    assert document.name == "corpus/" + name.encode("unicode_escape").decode()


def test_a_folder_deeper_than_python_can_recurse_is_read(tmp_path, folder):
    levels = range(1200)
    with contextlib.chdir(folder):
        for _ in levels:
            Path("d").mkdir()
            os.chdir("d")
        Path("a.txt").write_text("deep")
        (document,) = read_all(plan(tmp_path, folder))
        Path("a.txt").unlink()
        for _ in levels:  # shutil.rmtree cannot
            os.chdir("..")
            Path("d").rmdir()
    assert document.text == "deep"


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("{", "its state.json does not list the files of a dataset"),
        ('{"_data_files": [3]}', "its state.json does not list the files of a dataset"),
        (
            '{"_data_files": [{"filename": "../../secret.arrow"}]}',
            "its state.json lists files outside of its folder",
        ),
    ],
)
def test_a_dataset_that_does_not_say_what_it_is_is_named(
    tmp_path, folder, state, reason
):
    (folder / "a.txt").write_text("good")
    (write_dataset(folder, ["bad"]) / "state.json").write_text(state)
    corpus = plan(tmp_path, folder)
    assert [x.text for x in read_all(corpus)] == ["good"]
    assert corpus.left_out == (("corpus/saved", reason),)


def test_a_table_that_is_damaged_in_the_middle_gives_what_comes_before(
    tmp_path, folder
):
    path = write_parquet(folder, [f"document {i:03} " * 50 for i in range(90)], rows=30)
    raw = bytearray(path.read_bytes())
    at = pq.ParquetFile(path).metadata.row_group(1).column(1).dictionary_page_offset
    raw[at : at + 40] = b"\xff" * 40
    path.write_bytes(raw)
    corpus = plan(tmp_path, path)
    assert sorted(x.text[:12] for x in read_all(corpus)) == [
        f"document {i:03}" for i in range(30)
    ]
    assert corpus.left_out == (("a.parquet:30", "it cannot be read from here on"),)


def test_a_text_that_ends_outside_of_its_file_is_never_looked_at(tmp_path, folder):
    (folder / "a.txt").write_text("good")
    path = write_arrow(folder, ["x" * 5, "y" * 6, "z" * 7], name="b.arrow")
    ends = [n.to_bytes(4, "little") for n in (5, 11, 18)]
    raw = path.read_bytes()
    assert raw.count(b"".join(ends)) == 1
    ends[1] = (2**31 - 1).to_bytes(4, "little")
    path.write_bytes(raw.replace(b"\5\0\0\0\x0b\0\0\0\x12\0\0\0", b"".join(ends)))
    corpus = plan(tmp_path, folder)
    assert [x.text for x in read_all(corpus)] == ["good"]
    assert corpus.left_out == (("corpus/b.arrow", sources.DAMAGED),)


def test_texts_of_a_table_that_are_no_utf8_are_named(tmp_path, folder):
    raw = pa.array([b"good", b"caf\xe9"], pa.binary())
    texts = pa.Array.from_buffers(pa.string(), 2, raw.buffers())  # unchecked, as many
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet")
    corpus = plan(tmp_path, folder)
    assert [x.text for x in read_all(corpus)] == ["good"]
    assert corpus.left_out == (("corpus/a.parquet:1", "it is no UTF-8 text"),)


def test_a_thousand_are_named_and_all_are_counted(tmp_path, folder):
    path = folder / "a.jsonl"
    path.write_text("{}\n" * 1500 + '{"text": "good"}')
    corpus = plan(tmp_path, path)
    assert len(corpus.left_out) == 1000
    assert corpus.counts == {"it has no field 'text'": 1500}
    assert corpus.left_out[-1][0] == "a.jsonl:1000"


# What changes between the plan and the reading


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_that_changed_or_is_gone_is_named(tmp_path, folder, kind):
    texts = ["first", "second", "third", "fourth"]
    path = kind(folder, texts)
    corpus = plan(tmp_path, path)
    shutil.rmtree(folder)
    reasons = {reason for _, reason in read_all(corpus)}
    assert reasons == {"it cannot be read: No such file or directory"}
    folder.mkdir()
    kind(folder, ["first", "Second", "third", "fourth"])  # at the same places
    found = read_all(corpus)
    assert {x.text for x in found if isinstance(x, Document)} == {*texts} - {"second"}
    (name, reason) = next(x for x in found if isinstance(x, tuple))
    assert name.endswith((":1", ":2", "1.txt"))
    assert reason == CHANGED


def test_a_file_that_became_shorter_or_something_else_is_named(tmp_path, folder):
    texts = [f"document {i}" for i in range(6)]
    for kind in KINDS[1:5]:
        path = kind(folder, texts)
        corpus = plan(tmp_path, path)
        kind(folder, texts[:2])
        found = read_all(corpus)
        assert {x.text for x in found if isinstance(x, Document)} == {*texts[:2]}
        assert [x[1] for x in found if isinstance(x, tuple)] == [CHANGED] * 4
        path.write_bytes(b"\0" * 100)
        reasons = {reason for _, reason in read_all(corpus)}
        assert reasons == {CHANGED if path.suffix == ".jsonl" else sources.DAMAGED}


def test_a_file_that_vanishes_while_the_corpus_is_planned_is_named(tmp_path, folder):
    (folder / "a.txt").write_text("good")
    (folder / "b.txt").write_text("gone")
    calls = []

    def progress(done, total):
        calls.append((done, total))
        (folder / "b.txt").unlink(missing_ok=True)

    corpus = plan(tmp_path, folder, progress=progress)
    assert calls[-1] == (8, 8)
    assert [x.text for x in read_all(corpus)] == ["good"]
    reason = "it cannot be read: No such file or directory"
    assert corpus.left_out == (("corpus/b.txt", reason),)


@pytest.mark.parametrize("kind", KINDS)
def test_progress_rises_to_the_whole(tmp_path, folder, kind, monkeypatch):
    monkeypatch.setattr("regard.atlas.corpus.PAUSE", -1)
    calls = []
    path = kind(folder, [f"document {i}" for i in range(20)])
    plan(tmp_path, path, progress=lambda *call: calls.append(call))
    (total,) = {total for _, total in calls}
    done = [done for done, _ in calls]
    assert total == done[-1] > 0
    assert done == sorted(done)
    assert any(0 < x < total for x in done)


def test_what_progress_raises_ends_the_work_and_nothing_is_written(tmp_path, folder):
    with pytest.raises(KeyboardInterrupt):
        plan(tmp_path, write_lines(folder, ["a"]), progress=interrupt)
    assert [x.name for x in tmp_path.iterdir()] == ["corpus"]


def interrupt(done, total):
    raise KeyboardInterrupt


# The manifest


def test_a_manifest_opens_as_it_was_written(tmp_path, folder):
    path = write_lines(folder, ["a", "b", "a"])
    with path.open("a") as file:
        file.write("\nbad")
    before = plan(tmp_path, path, shard=1)
    after = open_corpus(tmp_path / "manifest.parquet")
    for name in ("digest", "size", "documents", "copies", "counts", "left_out"):
        assert getattr(after, name) == getattr(before, name)
    assert after.left_out == (("a.jsonl:4", "it is no JSON"),)
    assert [after.shard(i) for i in range(2)] == [before.shard(i) for i in range(2)]
    rows = pq.read_table(tmp_path / "manifest.parquet").to_pylist()
    assert [row["shard"] for row in rows] == [0, 1]
    assert sorted(rows[0]) == ["at", "digest", "file", "name", "shard"]
    assert {x.name for x in tmp_path.iterdir()} == {"corpus", "manifest.parquet"}


def test_the_digest_is_that_of_the_documents_alone(tmp_path, folder):
    path = write_lines(folder, ["a", "b", "c"])
    whole = plan(tmp_path, path).digest
    assert plan(tmp_path, path, shard=2).digest == whole
    assert plan(tmp_path, path, documents=2).digest != whole
    write_lines(folder, ["a", "b", "C"])
    assert plan(tmp_path, path).digest != whole


def test_a_damaged_manifest_is_refused_or_says_what_it_said(tmp_path, folder):
    path = write_lines(folder, [f"document {i}" for i in range(9)])
    corpus = plan(tmp_path, path, shard=4)
    expected = [corpus.shard(i) for i in range(3)]
    raw = corpus.manifest.read_bytes()
    damaged = tmp_path / "damaged.parquet"
    refused = 0
    for at in range(0, len(raw), 3):
        changed = bytearray(raw)
        changed[at] ^= 255
        damaged.write_bytes(changed)
        try:
            opened = open_corpus(damaged)
            assert [opened.shard(i) for i in range(3)] == expected
            assert (opened.digest, opened.counts) == (corpus.digest, corpus.counts)
        except FileError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > len(raw) / 6
    for n in range(0, len(raw), 97):
        damaged.write_bytes(raw[:n])
        with pytest.raises(FileError, match=r"cannot be opened: it is damaged"):
            open_corpus(damaged)


def rewrite(path, change):
    """Write a manifest again, with valid checksums of pages, after a change of rows."""
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda rows: rows.reverse(), "its rows are not in order"),
        (lambda rows: rows.append(rows[-1]), "its rows are not in order"),
        (lambda rows: rows.pop(), "it is damaged"),
        (lambda rows: rows[0].update(shard=1), "its rows are not in order"),
        (lambda rows: rows[0].update(digest="0" * 32), "it is damaged"),
        (lambda rows: rows[0].update(digest="no"), "its rows are not in order"),
    ],
)
def test_a_manifest_of_other_rows_is_refused(tmp_path, folder, change, reason):
    corpus = plan(tmp_path, write_lines(folder, ["a", "b", "c", "d"]), shard=2)
    rewrite(corpus.manifest, change)
    with pytest.raises(FileError, match=f"cannot be opened: {reason}. Plan it again"):
        open_corpus(corpus.manifest)


def test_what_is_no_manifest_is_refused(tmp_path, folder):
    with pytest.raises(FileError, match="there is no manifest"):
        open_corpus(tmp_path / "missing")
    with pytest.raises(FileError, match="it is no manifest of a corpus"):
        open_corpus(write_parquet(folder, ["a"]))
    with pytest.raises(FileError, match="cannot be opened"):
        open_corpus(folder)
    corpus = plan(tmp_path, write_lines(folder, ["a"]))
    table = pq.read_table(corpus.manifest)
    text = table.schema.metadata[b"regard"].replace(b'"copies": 0', b'"copies": 7')
    metadata = {**table.schema.metadata, b"regard": text}
    pq.write_table(table.replace_schema_metadata(metadata), corpus.manifest)
    with pytest.raises(FileError, match="it is damaged"):
        open_corpus(corpus.manifest)


def test_a_manifest_that_cannot_be_written_leaves_the_old_one(tmp_path, folder):
    path = write_lines(folder, ["a"])
    with pytest.raises(FileError, match="was not written"):
        plan_corpus([path], tmp_path / "missing" / "manifest")
    manifest = tmp_path / "manifest.parquet"
    plan(tmp_path, path)
    before = manifest.read_bytes()
    with pytest.raises(FileError, match="no documents in"):
        plan_corpus([folder / ".."], manifest, field="other")
    assert manifest.read_bytes() == before


@pytest.mark.parametrize("options", [{"shard": 0}, {"shard": True}, {"documents": 0}])
def test_odd_options_are_refused(tmp_path, folder, options):
    with pytest.raises(OptionError, match="expected a whole number from 1"):
        plan(tmp_path, write_lines(folder, ["a"]), **options)


def test_paths_and_shards_that_do_not_exist_are_refused(tmp_path, folder):
    with pytest.raises(FileError, match=r"there is no .*nothing, expected a file"):
        plan(tmp_path, folder, folder / "nothing")
    with pytest.raises(FileError, match=r"no documents in .*\(no files\)"):
        plan(tmp_path, folder)
    (folder / "a.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(FileError, match=r"a\.gz: it is compressed"):
        plan(tmp_path, folder)
    corpus = plan_corpus(write_lines(folder, ["a"]), tmp_path / "m")  # one path
    with pytest.raises(OptionError, match="there is no shard 1, expected 0 to 0"):
        corpus.shard(1)


def test_the_memory_of_a_plan_is_that_of_its_digests(tmp_path, folder):
    path = folder / "a.jsonl"
    with path.open("w") as file:
        for i in range(20_000):
            file.write(json.dumps({"text": f"document {i} " * 20}) + "\n")
    plan(tmp_path, path, documents=1)
    tracemalloc.start()
    try:
        plan(tmp_path, path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000 * 100 + 6e6  # the texts alone are 6 MB
