"""Note which files of the repository a process reads.

kept_results.py starts this in the process of each test file. A line of a .pth file
starts it in every Python that a test starts: REGARD_READS names this file and the log.
A name is appended before it is read for the first time, so a process that is killed has
noted what it read:

    src/regard/errors.py    a file that was opened, or whether it exists
    docs/                   the names in a folder; ./ is the root
    .                       everything: a program was started that may read any file
    src/regard/lapack.py    absent: an import looked for it

Standard library only, and nothing that a test could replace.

Next: kept_results.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

# Started in the repository they read what they are given: arguments are noted.
HARMLESS = {"chrome", "chromium", "chromium-headless-shell", "headless_shell", "node"}
HARMLESS |= {"raylet", "gcs_server", "c++", "g++", "gcc", "cc", "ldconfig", "uname"}
HARMLESS |= {"mount", "umount"}
COMMANDS = {"os.system", "os.exec", "os.posix_spawn", "os.spawn"}
BLIND = {"-S", "-SI", "-IS"}  # a Python without .pth files


class Reads:
    """What this process has noted so far."""

    def __init__(self, root: str, log: str) -> None:
        self.root, self.log = os.path.realpath(root), log
        self.noted: set[str] = set()
        self.known: set[str] = set()  # paths that were noted, or lie elsewhere

    def note(self, name: str) -> None:
        """Append a name to the log, once."""
        if name in self.noted:
            return
        self.noted.add(name)
        file = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, os.fsencode(f"{name}\n"))
        os.close(file)

    def note_path(self, path: Any, end: str = "") -> None:
        """Note a file, or with end="/" a folder, that lies in the repository."""
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a number: it was opened before
        try:
            path = os.path.abspath(os.fsdecode(path))
            inside = path + end not in self.known and self.is_inside(path)
        except (OSError, ValueError):
            return  # no folder to start from, or no name of a file: nothing is read
        self.known.add(path + end)
        if not inside:
            return
        name = os.path.realpath(path)[len(self.root) + 1 :]
        if name:
            folder, cache, file = name.rpartition("__pycache__/")
            if cache:  # compiled from the file next to the folder
                name = folder + file.partition(".")[0] + ".py"
            self.note("." if name.startswith(".git/") else name + end)
        elif end:
            self.note("./")

    def is_inside(self, path: Any) -> bool:
        """Return whether a path lies in the repository."""
        return f"{os.path.realpath(path)}/".startswith(f"{self.root}/")

    def note_import(self, name: str) -> None:
        """Note where an import looks for a module that may appear there."""
        top, _, rest = name.partition(".")
        for place in sys.path:
            if self.is_inside(place) and (not rest or os.path.isdir(f"{place}/{top}")):
                file = f"{place}/{name.replace('.', '/')}"
                self.note_path(f"{file}.py")
                self.note_path(f"{file}/__init__.py")

    def note_command(self, program: Any, words: Any, folder: Any, env: Any) -> None:
        """Note what a program may read: nothing, its arguments, or everything."""
        words = [os.fsdecode(x) for x in ([words] if isinstance(words, str) else words)]
        program = os.fsdecode(program or words[0])
        ours = os.path.dirname(program) == os.path.dirname(sys.executable)
        if ours and is_python(program) and not BLIND & {*words}:
            named = env is None or "REGARD_READS" in env or b"REGARD_READS" in env
            return None if named else self.note(".")
        if os.path.basename(program) in HARMLESS:
            for word in words[1:]:
                self.note_path(word)
        elif self.is_inside(folder or os.getcwd()) or self.root in " ".join(words):
            self.note(".")
        return None

    def hear(self, event: str, given: tuple[Any, ...]) -> None:
        """Note what an audit event of Python says."""
        if event == "open":
            self.note_path(given[0])
        elif event in {"os.listdir", "os.scandir"}:
            caller = sys._getframe(1).f_code.co_filename  # noqa: SLF001
            # they list every folder on the way to what they open
            searches = ("<frozen importlib", "/importlib/metadata/", "/_pytest/")
            if not any(x in caller for x in searches):
                self.note_path("." if given[0] is None else given[0], "/")
        elif event == "import":
            self.note_import(given[0])
        elif event == "subprocess.Popen":
            self.note_command(*given)
        elif event in COMMANDS and (self.is_inside(".") or self.root in repr(given)):
            self.note(".")


def is_python(program: str) -> bool:
    """Return whether a command of an environment is Python or a script for it."""
    if os.path.basename(program).startswith("python"):
        return True
    try:
        return Path(program).read_bytes()[:2] == b"#!"
    except OSError:
        return False


def start(file: str, log: str) -> None:
    """Note what this process reads from here on; file is this one."""
    root = os.path.dirname(os.path.dirname(os.path.realpath(file)))
    reads, ask = Reads(root, log), os.stat

    def stat(path: Any, *rest: Any, **named: Any) -> os.stat_result:
        reads.note_path(path)  # no audit event
        return ask(path, *rest, **named)

    for group in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
        group.add(stat)  # shutil asks
    os.stat = stat
    sys.addaudithook(reads.hear)
    sys.regard_reads = reads  # whose log kept_results.py replaces for each test


start(*os.environ["REGARD_READS"].split(os.pathsep))
