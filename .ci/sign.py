r"""Sign the files of a release, and verify the signature as a reader would.

    sign(folder, key)       SHA256SUMS and SHA256SUMS.sig, with ssh-keygen -Y sign
    verify(folder, signer)  raises unless the signature and every sum hold

A signature is of SHA256SUMS, which holds the sum of every file:

    ssh-keygen -Y verify -f signers -I release@regard -n regard \
        -s SHA256SUMS.sig < SHA256SUMS
    sha256sum -c SHA256SUMS

A rehearsal signs with a key that is made for it and deleted afterwards. It shows that
the steps work, not who made the files. A real release is signed on GitHub, by an
attestation that names the workflow and the commit (.github/workflows/release.yml): no
key is kept.

Next: release.py
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

SUMS = "SHA256SUMS"
NAME, PURPOSE = "release@regard", "regard"


class SignatureError(Exception):
    """A signature or a sum that does not hold."""


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_sums(folder: Path, files: list[Path]) -> Path:
    """Write the sum of each file, in the format of sha256sum."""
    lines = [f"{hash_file(path)}  {path.name}\n" for path in sorted(files)]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
    return folder / SUMS


def make_key(folder: Path) -> tuple[Path, Path]:
    """Return a new key without a passphrase, and the list of signers that has it."""
    key = folder / "key"
    command = [
        "ssh-keygen",
        "-q",
        "-t",
        "ed25519",
        "-N",
        "",
        "-C",
        NAME,
        "-f",
        str(key),
    ]
    subprocess.run(command, check=True)
    signers = folder / "signers"
    public = key.with_suffix(".pub").read_text(encoding="utf-8")
    signers.write_text(f'{NAME} namespaces="{PURPOSE}" {public}', encoding="utf-8")
    return key, signers


def sign(folder: Path, key: Path) -> Path:
    """Sign the sums with a key; return the signature."""
    sums, made = folder / SUMS, folder / f"{SUMS}.sig"
    made.unlink(missing_ok=True)  # ssh-keygen asks before it replaces one
    command = [
        "ssh-keygen",
        "-q",
        "-Y",
        "sign",
        "-f",
        str(key),
        "-n",
        PURPOSE,
        str(sums),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return made


def verify(folder: Path, signers: Path) -> int:
    """Return the number of files whose sums were signed and hold."""
    sums = folder / SUMS
    command = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", NAME]
    command += ["-n", PURPOSE, "-s", str(folder / f"{SUMS}.sig")]
    text = sums.read_bytes()
    done = subprocess.run(command, input=text, check=False, capture_output=True)
    if done.returncode:
        raise SignatureError(f"{sums.name} is not what was signed.")
    rows = [line.split("  ", 1) for line in text.decode().splitlines()]
    for wanted, name in rows:
        if hash_file(folder / name) != wanted:
            raise SignatureError(f"{name} is not the file whose sum was signed.")
    return len(rows)
