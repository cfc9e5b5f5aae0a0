"""The tests that start a vLLM of their own take turns: a fifth of them for each commit.

REGARD_SERVING chooses the fifth, 0 to 4, or all. Those that share one server always run.
"""

import os

SHARES = 5
OWN = {
    "test_the_limits_hold_and_a_killed_server_leaves_whole_files",
    "test_two_ranks_write_one_recording",
    "test_nothing_is_recorded_unless_the_operator_wants_it",
}


def pytest_collection_modifyitems(config, items):
    mine = [x for x in items if x.path.name == "test_vllm.py" or x.name in OWN]
    turn = os.environ.get("REGARD_SERVING", "0")
    if turn != "all":
        others = [x for i, x in enumerate(mine) if i % SHARES != int(turn)]
        config.hook.pytest_deselected(items=others)
        items[:] = [x for x in items if x not in others]
