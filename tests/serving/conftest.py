"""The tests that start a vLLM of their own take turns: a fifth of them for each commit.

REGARD_SERVING=all runs all. Those that share one server always run.
"""

import os
import subprocess

SHARES = 5
OWN = {
    "test_the_limits_hold_and_a_killed_server_leaves_whole_files",
    "test_two_ranks_write_one_recording",
    "test_nothing_is_recorded_unless_the_operator_wants_it",
}


def pytest_collection_modifyitems(config, items):
    mine = [x for x in items if x.path.name == "test_vllm.py" or x.name in OWN]
    if not mine or os.environ.get("REGARD_SERVING") == "all":
        return
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    turn = int(done.stdout.strip() or "0", 16) % SHARES
    others = [x for i, x in enumerate(mine) if i % SHARES != turn]
    config.hook.pytest_deselected(items=others)
    items[:] = [x for x in items if x not in others]
