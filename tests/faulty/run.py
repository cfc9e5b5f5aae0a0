"""Put every fault into every exercise and count what the grader rejects.

    PYTHONPATH=tests python -m faulty.run            some minutes; writes result.json
    PYTHONPATH=tests python -m faulty.run softmax    the same for one exercise only

Next: syntax.py
"""

# ruff: noqa: T201

import json
import sys
from collections import Counter
from pathlib import Path

from faulty.trial import VERDICTS, try_faults
from regard.learn.course import ORDER

RESULT = Path(__file__).with_name("result.json")


def count(name):
    """Return how many faults of an exercise have each verdict; print the accepted."""
    found = list(try_faults(name))
    for kind, fault, verdict in found:
        if verdict == "accepted":
            print(f"  accepted ({kind}): {fault}")
    counts = Counter(verdict for _, _, verdict in found)
    return {verdict: counts[verdict] for verdict in VERDICTS}


def main():
    """Run all exercises, or the named ones."""
    rows = json.loads(RESULT.read_text("utf-8"))["exercises"]
    for name in sys.argv[1:] or ORDER:
        rows[name] = count(name)
        print(f"{name:20}", *(f"{v} {n:4}" for v, n in rows[name].items()), flush=True)
    rows = {name: rows[name] for name in ORDER}
    total = {v: sum(row[v] for row in rows.values()) for v in VERDICTS}
    print(f"{'all':20}", *(f"{v} {n:4}" for v, n in total.items()))
    result = {"exercises": rows, "all": total}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return 1 if total["accepted"] else 0


if __name__ == "__main__":
    sys.exit(main())
