"""Python for browsers: downloaded once, verified by hash, cached for the next site.

    fetch_runtime()             a folder with the six files, cached or downloaded
    list_runtime(folder)        the files in a folder of yours; raises if one is wrong

    npm package pyodide         four files of Python, and the lock file
    Pyodide's release           the NumPy wheel that the lock file names

pyodide.sha256 has the hashes of the files from npm, and the lock file has that of the
wheel. A file with another hash is never used. A wheel that you put into the cache
yourself is used like a downloaded one, so a computer without network access can build.

Next: assets/lesson.js
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.request import Request, urlopen

from regard.atomic_file import write_atomically
from regard.errors import FileError

LOCK = "pyodide-lock.json"
VERSION = "314.0.3"  # of Pyodide, as used in the tests
HASHES = Path(__file__).parent / "pyodide.sha256"  # sha256sum of its npm package
NPM = f"https://registry.npmjs.org/pyodide/-/pyodide-{VERSION}.tgz"
RELEASE = f"https://cdn.jsdelivr.net/pyodide/v{VERSION}/full"
STALLED = 60  # seconds without data after which a download is given up
PIECE = 2**18  # bytes that are read at a time
OFFLINE = (
    "Without network access, build with --pyodide FOLDER; docs/learn-site.md lists the "
    "files that it must contain."
)

Tell = Callable[[str], None]  # gets a line of progress, which replaces the last one


def fetch_runtime(tell: Tell = lambda _: None, *, folder: Path | None = None) -> Path:
    """Return a folder with Pyodide and NumPy; download what it lacks.

    folder: by default, in the user's cache
    """
    folder = find_runtime_cache() if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    if not all(is_intact(folder / x, digest) for x, digest in read_hashes().items()):
        fetch_package(folder, tell)
    wheel, digest = read_wheel(folder)
    if not is_intact(folder / wheel, digest):
        address = f"{RELEASE}/{wheel}"
        try:
            found = download(address, tell)
            check_hash(address, found, digest)
        except (OSError, FileError) as error:
            raise FileError(
                f"NumPy for browsers could not be downloaded from {address}: {error}. "
                f"Put {wheel} into {folder}. {OFFLINE}"
            ) from None
        with write_atomically(folder / wheel) as new:
            new.write_bytes(found)
    return folder


def find_runtime_cache() -> Path:
    """Return the folder of this version in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "regard" / f"pyodide-{VERSION}"


def read_hashes() -> dict[str, str]:
    """Return the sha256 of each file that comes from npm."""
    lines = map(str.split, HASHES.read_text("utf-8").splitlines())
    return {name: digest for digest, name in lines}


def is_intact(path: Path, expected: str) -> bool:
    """Return whether a file exists and has this sha256."""
    return path.is_file() and hash_bytes(path.read_bytes()) == expected


def hash_bytes(found: bytes) -> str:
    """Return the sha256 of some bytes."""
    return hashlib.sha256(found).hexdigest()


def check_hash(place: str | Path, found: bytes, expected: str) -> None:
    """Raise if the sha256 of some bytes is not the expected one."""
    if (digest := hash_bytes(found)) != expected:
        raise FileError(
            f"{place} has the sha256 {digest}, expected {expected}: "
            f"download it again from Pyodide {VERSION}."
        )


def fetch_package(folder: Path, tell: Tell) -> None:
    """Download the npm package and unpack the files that browsers need."""
    failed = []
    for fetch in (pack_with_npm, download_package):
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "pyodide.tgz"
            try:
                fetch(path, tell)
                unpack_package(path, folder)
            except (OSError, tarfile.TarError, FileError, KeyError) as error:
                failed.append(" ".join(str(error).split()))
            else:
                return
    raise FileError(
        f"Pyodide {VERSION} could not be downloaded from npm: {'; '.join(failed)}. "
        f"{OFFLINE}"
    )


def download_package(path: Path, tell: Tell) -> None:
    """Download the package from npm's public registry."""
    path.write_bytes(download(NPM, tell))


def pack_with_npm(path: Path, tell: Tell) -> None:
    """Download the package with npm, which knows the user's registry and proxy."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    tell(f"Pyodide {VERSION} with npm …")
    command = [npm, "pack", f"pyodide@{VERSION}"]
    run = subprocess.run(  # noqa: S603 (a fixed command)
        command, capture_output=True, text=True, check=False, cwd=path.parent
    )
    found = list(path.parent.glob("*.tgz"))
    if run.returncode or not found:
        errors = [x for x in run.stderr.splitlines() if x.startswith("npm error")]
        raise OSError(f"npm pack exited with {run.returncode} ({' '.join(errors[:3])})")
    found[0].rename(path)


def unpack_package(package: Path, folder: Path) -> None:
    """Unpack the known files of the npm package, each with the expected hash."""
    with tarfile.open(package) as tar:
        files = {}
        for name, expected in read_hashes().items():
            member = tar.extractfile(f"package/{name}")
            files[name] = b"" if member is None else member.read()
            check_hash(name, files[name], expected)
    for name, found in files.items():
        with write_atomically(folder / name) as new:
            new.write_bytes(found)


def download(address: str, tell: Tell) -> bytes:
    """Return the contents of a URL; report the progress."""
    name = address.rpartition("/")[2]
    tell(f"{name} from {address.split('/')[2]} …")
    request = Request(address, headers={"User-Agent": "regard"})  # noqa: S310 (ours)
    with urlopen(request, timeout=STALLED) as answer:  # noqa: S310
        total = int(answer.headers.get("Content-Length") or 0)
        found = bytearray()
        while piece := answer.read(PIECE):
            found += piece
            tell(f"{name}: {len(found) / 1e6:.1f} of {total / 1e6:.1f} MB")
    return bytes(found)


def read_wheel(folder: Path) -> tuple[str, str]:
    """Return the name and the sha256 of the NumPy wheel, as in the lock file."""
    lock = folder / LOCK
    try:
        numpy = json.loads(lock.read_text("utf-8"))["packages"]["numpy"]
        wheel, expected = str(numpy["file_name"]), str(numpy["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        raise FileError(
            f"{lock} is missing or does not list NumPy; expected a folder with "
            "Pyodide and its NumPy wheel, as described in docs/learn-site.md."
        ) from None
    return Path(wheel).name, expected


def list_runtime(folder: Path) -> tuple[Path, ...]:
    """Return the files of Pyodide and NumPy in a folder; verify their checksums."""
    wheel, expected = read_wheel(folder)
    known = read_hashes() | {wheel: expected}
    known.pop(LOCK, None)  # that of a larger release lists the same NumPy
    lacking = [name for name in known if not (folder / name).is_file()]
    if lacking:
        raise FileError(f"{folder} lacks {', '.join(lacking)} of Pyodide {VERSION}.")
    for name, expected in known.items():
        check_hash(folder / name, (folder / name).read_bytes(), expected)
    return folder / LOCK, *(folder / name for name in known)
