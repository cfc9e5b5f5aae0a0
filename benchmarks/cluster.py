"""An atlas on two Ray nodes, of which one is killed half-way; then its driver is too.

    python benchmarks/cluster.py          writes cluster.json and docs/scale.md

Both nodes are processes of this machine, on loopback: a head, and a second one that
joins it. The same command as on one machine runs against the cluster; when a third of
the shards are done, every process of the second node gets SIGKILL, and later the driver
does. The same command again goes on, with the node that is left. The table must have
the bits of a plain loop.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

from atlas import write_corpora
from marks import fill
from processes import list_processes
from smollm import find_smollm

from regard.atlas.table import read_table

HERE = Path(__file__).parent
MARK = "<!-- benchmark:cluster -->"
PORT = 6397
DOCUMENTS, LENGTH, SHARD = 96, 128, 4
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
ENV = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


def start_node(*options: str) -> subprocess.Popen[bytes]:
    """Start a node that lives as long as its process."""
    size = ("--num-cpus=2", f"--object-store-memory={256 << 20}", "--block")
    return subprocess.Popen(
        [*RAY, "start", *options, *size],
        env=ENV,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_for_nodes(count: int) -> None:
    """Wait until so many nodes answer."""
    code = (
        f"import ray; ray.init('127.0.0.1:{PORT}', log_to_driver=False);"
        f"assert sum(x['Alive'] for x in ray.nodes()) == {count}"
    )
    for _ in range(60):
        done = subprocess.run(
            [sys.executable, "-c", code], env=ENV, capture_output=True, check=False
        )
        if done.returncode == 0:
            return
        time.sleep(2)
    raise SystemExit(f"{count} nodes did not come: {done.stderr.decode()[-500:]}")


def kill(root: int) -> int:
    """Kill a process and all below it at once; return how many there were."""
    pids = list_processes(root)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(pids)


def start_run(folder: Path, corpus: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start the command of a user."""
    command = [sys.executable, "-m", "regard", "atlas", "run", str(folder)]
    command += ["--model", str(find_smollm()), "--corpus", str(corpus)]
    command += ["--documents", str(DOCUMENTS), "--length", str(LENGTH)]
    return subprocess.Popen([*command, "--shard", str(SHARD), *options], env=ENV)


def count_results(folder: Path) -> int:
    """Return how many shards are done."""
    return len(list((folder / "results").glob("0-*.parquet")))


def wait_for_results(run: subprocess.Popen[bytes], folder: Path, count: int) -> None:
    """Wait until so many shards are done."""
    while count_results(folder) < count:
        if run.poll() is not None:
            raise SystemExit(f"the run ended after {count_results(folder)} shards")
        time.sleep(0.2)


def digest(folder: Path) -> str:
    """Return what stands for all bits of a table."""
    tally = read_table(folder).tally
    numbers = tally.sums.tobytes() + tally.peak.tobytes() + tally.top.tobytes()
    return blake2b(numbers, digest_size=8).hexdigest()


def disturb(folder: Path, corpus: Path) -> dict[str, Any]:
    """Run on two nodes, kill one and the driver, and go on."""
    shards = DOCUMENTS // SHARD
    ray = ("--runner", "ray", "--workers", "2", "--address", f"127.0.0.1:{PORT}")
    head = start_node("--head", f"--port={PORT}", "--include-dashboard=false")
    second = None
    try:
        wait_for_nodes(1)
        second = start_node(f"--address=127.0.0.1:{PORT}")
        wait_for_nodes(2)
        run = start_run(folder, corpus, *ray)
        wait_for_results(run, folder, shards // 3)
        killed, at_kill = kill(second.pid), count_results(folder)
        wait_for_results(run, folder, at_kill + shards // 4)
        run.kill()
        run.wait()
        at_driver = count_results(folder)
        if start_run(folder, corpus, *ray).wait():
            raise SystemExit("the run did not go on")
        return {
            "shards": shards,
            "when the node died": at_kill,
            "processes killed with it": killed,
            "when the driver died": at_driver,
        }
    finally:
        for node in (second, head):
            if node is not None:
                kill(node.pid)


def render(result: dict[str, Any]) -> str:
    """Return the result in words."""
    x = result["cluster"]
    same = "the same" if result["same bits"] else "NOT the same"
    return (
        f"Two nodes on loopback, {x['shards']} shards of SmolLM2: one node was killed "
        f"with all its {x['processes killed with it']} processes after "
        f"{x['when the node died']} shards, the driver after "
        f"{x['when the driver died']}; the resumed command produced {same} bits "
        "as the loop runner."
    )


def main() -> None:
    """Measure and write the results."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prose, _ = write_corpora(folder)
        cluster = disturb(folder / "cluster", prose)
        if start_run(folder / "loop", prose, "--runner", "loop").wait():
            raise SystemExit("the loop failed")
        same = digest(folder / "cluster") == digest(folder / "loop")
    result = {"cluster": cluster, "same bits": same}
    (HERE / "cluster.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    print(render(result))
    fill("docs/scale.md", MARK, render(result))


if __name__ == "__main__":
    main()
