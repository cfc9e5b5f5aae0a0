"""Python for browsers is downloaded once, from npm and Pyodide's release, and verified."""

import hashlib
import http.server
import io
import json
import os
import stat
import sys
import tarfile
import threading
from functools import partial
from pathlib import Path

import pytest

from regard.errors import FileError
from regard.learn import pyodide_files
from regard.learn.pyodide_files import LOCK, fetch_runtime, list_runtime

WHEEL = "numpy-9-wasm32.whl"
NPM = """#!{python}
import pathlib, sys
assert sys.argv[1:] == ["pack", "pyodide@{version}"], sys.argv
pathlib.Path("pyodide-{version}.tgz").write_bytes(
    pathlib.Path("{package}").read_bytes())
"""


def hash_text(text):
    return hashlib.sha256(text.encode()).hexdigest()


class Quiet(http.server.SimpleHTTPRequestHandler):
    asked: list

    def log_message(self, *_):
        self.asked.append(self.path)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Serve a small package and a wheel; return the folder and what was asked for."""
    net = tmp_path / "net"
    net.mkdir()
    lock = {"packages": {"numpy": {"file_name": WHEEL, "sha256": hash_text("wheel")}}}
    files = {name: f"this is {name}" for name in pyodide_files.read_hashes()}
    files[LOCK] = json.dumps(lock)
    with tarfile.open(net / "pyodide.tgz", "w:gz") as tar:
        for name, text in {**files, "README.md": "not needed"}.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
    (net / WHEEL).write_text("wheel")
    hashes = "".join(f"{hash_text(text)}  {name}\n" for name, text in files.items())
    (tmp_path / "hashes").write_text(hashes)
    asked = []
    handler = partial(type("Handler", (Quiet,), {"asked": asked}), directory=str(net))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    host = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(pyodide_files, "HASHES", tmp_path / "hashes")
    monkeypatch.setattr(pyodide_files, "NPM", f"{host}/pyodide.tgz")
    monkeypatch.setattr(pyodide_files, "RELEASE", host)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # without npm
    yield net, asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_it_is_downloaded_once_and_verified(world, tmp_path):
    net, asked = world
    told = []
    folder = fetch_runtime(told.append)
    assert folder == tmp_path / "cache" / "regard" / f"pyodide-{pyodide_files.VERSION}"
    assert asked == ["/pyodide.tgz", f"/{WHEEL}"]
    assert f"{WHEEL}: 0.0 of 0.0 MB" in told
    assert {x.name for x in folder.iterdir()} == {*pyodide_files.read_hashes(), WHEEL}
    assert len(list_runtime(folder)) == 6
    (net / WHEEL).unlink()
    assert fetch_runtime() == folder
    assert len(asked) == 2  # from the cache


def test_a_damaged_file_of_the_cache_is_downloaded_again(world):
    _, asked = world
    folder = fetch_runtime()
    (folder / WHEEL).write_text("half a")
    fetch_runtime()
    assert asked[2:] == [f"/{WHEEL}"]
    (folder / LOCK).write_text("{}")
    fetch_runtime()
    assert asked[3:] == ["/pyodide.tgz"]
    assert len(list_runtime(folder)) == 6


def test_npm_is_asked_first_because_it_knows_the_registry(world, tmp_path):
    net, asked = world
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    options = {"python": sys.executable, "version": pyodide_files.VERSION}
    npm.write_text(NPM.format(package=net / "pyodide.tgz", **options))
    npm.chmod(npm.stat().st_mode | stat.S_IXUSR)
    fetch_runtime()
    assert asked == [f"/{WHEEL}"]


def test_an_npm_that_fails_is_not_the_end(world, tmp_path):
    _, asked = world
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text("#!/bin/sh\necho npm error offline >&2\nexit 1\n")
    npm.chmod(npm.stat().st_mode | stat.S_IXUSR)
    fetch_runtime()
    assert asked == ["/pyodide.tgz", f"/{WHEEL}"]


def test_without_network_it_says_what_to_do(world):
    net, _ = world
    (net / WHEEL).rename(net / "elsewhere")
    with pytest.raises(FileError) as error:
        fetch_runtime()
    folder = pyodide_files.find_runtime_cache()
    said = str(error.value)
    assert said.startswith("NumPy for browsers could not be downloaded from http://127")
    assert f"HTTP Error 404: File not found. Put {WHEEL} into {folder}. " in said
    assert said.endswith(
        "Without network access, build with --pyodide FOLDER; docs/learn-site.md lists "
        "the files that it must contain."
    )
    (folder / WHEEL).write_text("wheel")  # does as told
    assert fetch_runtime() == folder

    (folder / "pyodide.mjs").unlink()
    (net / "pyodide.tgz").unlink()
    with pytest.raises(FileError) as error:
        fetch_runtime()
    assert str(error.value).startswith(
        f"Pyodide {pyodide_files.VERSION} could not be downloaded from npm: npm is not "
        "installed; HTTP Error 404"
    )


def test_what_was_changed_on_the_way_is_never_used(world):
    net, _ = world
    (net / WHEEL).write_text("another wheel")
    with pytest.raises(FileError, match=r"has the sha256 \w+, expected"):
        fetch_runtime()
    folder = pyodide_files.find_runtime_cache()
    assert not (folder / WHEEL).exists()
    (net / "pyodide.tgz").write_bytes(b"not a package")
    (folder / LOCK).unlink()
    with pytest.raises(FileError, match="could not be downloaded from npm"):
        fetch_runtime()
    assert not (folder / LOCK).exists()


@pytest.mark.skipif(not os.environ.get("REGARD_PYODIDE"), reason="needs Pyodide")
def test_the_pinned_hashes_are_those_of_the_real_files():
    folder = Path(os.environ["REGARD_PYODIDE"])
    for name, digest in pyodide_files.read_hashes().items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert len(list_runtime(folder)) == 6
