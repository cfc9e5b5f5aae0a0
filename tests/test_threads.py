"""Torch's threads: how many, from the work and the free cores, and always given back."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

import regard
from regard import threads
from regard.atlas import runners
from regard.engine import attend, tiles
from regard.masks.patterns import causal
from regard.recording.record import Record, Recording
from regard.show.page import make_page
from regard.stats import tile_walk
from regard.stats.reducers import ColumnSums
from regard.stats.table import make_table
from regard.threads import (
    LARGE,
    SMALL,
    choose_threads,
    count_cores,
    count_free,
    count_others,
    fit_threads,
    hold_threads,
    measure_free,
    one_thread,
    read_quota,
    run_in_order,
    use_threads,
)


@pytest.fixture(autouse=True)
def three():
    """Give torch three threads, and let no test leave another number."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert (torch.get_num_threads(), ask_new_thread()) == (3, 3)
    assert not threads.RUNNING
    torch.set_num_threads(before)


def ask_new_thread(ask=torch.get_num_threads):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask).result()


@contextmanager
def free_cores(n, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threads, "count_free", lambda: n)
        yield


def make_record(n=40, heads=4):
    torch.manual_seed(0)
    q, k = torch.randn(heads, n, 16), torch.randn(2, n, 16)
    seen = regard.attention(q, k, k, causal(), scale=0.25)
    at = torch.arange(n)
    return Record(
        name="layer",
        q=q,
        k=k,
        lse=seen.lse,
        scale=0.25,
        mask=causal(),
        q_positions=at,
        k_positions=at,
    )


@pytest.mark.parametrize(
    ("work", "limit", "free", "expected"),
    [
        (SMALL - 1, 8, 8, 1),  # small, whatever is free
        (SMALL, 8, 8, 8),
        (SMALL, 8, 3, 3),  # others use five cores
        (SMALL, 2, 8, 2),  # never more than torch had
        (SMALL, 8, 0, 1),
        (8 * LARGE - 1, 8, 1, 1),  # threads would wait for the busy cores
        (8 * LARGE, 8, 1, 8),  # but not for long, compared with their own work
        (1e15, 1, 8, 1),
    ],
)
def test_threads_follow_from_the_work_and_the_free_cores(work, limit, free, expected):
    assert choose_threads(work, limit=limit, free=free) == expected


def test_cores_are_counted_only_if_it_matters(monkeypatch):
    asked = []
    monkeypatch.setattr(threads, "count_free", lambda: asked.append(1) or 2)
    assert [fit_threads(SMALL - 1, 8), fit_threads(SMALL, 1)] == [1, 1]
    assert fit_threads(8 * LARGE, 8) == 8
    assert not asked
    assert (fit_threads(SMALL, 8), asked) == (2, [1])


def test_the_count_of_free_cores_is_used_for_a_while(monkeypatch):
    now, counted = [100.0], iter([4, 2])
    monkeypatch.setattr(threads, "monotonic", lambda: now[0])  # not the one of all
    monkeypatch.setattr(threads, "measure_free", lambda *_: next(counted))
    monkeypatch.setattr(threads, "LATEST", [(-1.0, 9)])
    assert [count_free(), count_free()] == [4, 4]
    now[0] += threads.FRESH
    assert count_free() == 2


@pytest.mark.parametrize(
    ("cores", "online", "others", "expected"),
    [
        (4, 4, [0], 4),
        (4, 4, [3, 1, 2], 3),  # a daemon that ran for a moment is not counted
        (4, 4, [9, 9, 9], 1),
        (2, 64, [40], 2),  # ours are two of the machine's, of which 24 are free
        (2, 64, [63, 63, 63], 1),
    ],
)
def test_a_core_is_free_if_nobody_else_could_use_it(
    monkeypatch, cores, online, others, expected
):
    left = iter(others)
    monkeypatch.setattr(threads, "count_others", lambda: next(left))
    assert measure_free(cores, online) == expected
    assert next(left, None) is None


def test_others_are_the_runnable_threads_that_are_not_ours(monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "PROC", tmp_path)
    assert count_others() == 0  # not Linux
    (tmp_path / "loadavg").write_text("0.20 1.34 2.69 6/450 4711\n")
    for name, state in (("1", "R"), ("2", "S"), ("3", "R")):
        folder = tmp_path / "self/task" / name
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"{name} (a) b) R) {state} 1 2 3\n")
    assert count_others() == 4
    (tmp_path / "self/task/9").mkdir()
    (tmp_path / "self/task/9/stat").symlink_to("gone")  # a thread that has ended
    assert count_others() == 4
    (tmp_path / "loadavg").write_text("nonsense")
    assert count_others() == 0


def test_a_spinning_process_is_found():
    """The real /proc of this machine: this thread itself is not another one."""
    assert 0 <= count_others() < 10_000
    assert 1 <= count_free() <= count_cores()


def test_cores_are_those_of_the_affinity_and_the_cgroup(monkeypatch, tmp_path):
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(threads, "QUOTA", quota)
    monkeypatch.setattr(
        threads.os, "sched_getaffinity", lambda _: set(range(6)), raising=False
    )
    assert count_cores() == 6
    for text, expected in (
        ("max 100000", 6),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("900000 100000", 6),
    ):
        quota.write_text(text)
        assert count_cores() == expected
    quota.unlink()
    monkeypatch.delattr(threads.os, "sched_getaffinity")
    monkeypatch.setattr(threads.os, "cpu_count", lambda: None)
    assert count_cores() == 1
    assert read_quota("") == read_quota("1 2 3") > 1_000


def test_the_number_is_given_back_after_an_error():
    with hold_threads(2):
        assert torch.get_num_threads() == 2
    with pytest.raises(KeyboardInterrupt), hold_threads(1):
        assert torch.get_num_threads() == 1
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 3
    with hold_threads(None):
        assert torch.get_num_threads() == 3


def test_blocks_inside_of_each_other_restore_what_the_outer_one_set():
    with hold_threads(2):
        with one_thread() as limit:
            assert (limit, torch.get_num_threads()) == (3, 1)
            with hold_threads(1):
                assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError), one_thread():
            raise ZeroDivisionError
        assert torch.get_num_threads() == 2


def test_threads_do_not_take_each_others_number():
    inside, leave = threading.Barrier(2, timeout=20), threading.Event()

    def work(n):
        torch.set_num_threads(3)
        with hold_threads(n):
            inside.wait()
            leave.wait(20)
            here = torch.get_num_threads()
        return here, torch.get_num_threads()

    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(work, n) for n in (1, 2)]
        leave.set()
        assert [x.result() for x in done] == [(1, 3), (2, 3)]
    with one_thread() as limit:
        assert limit == 3


def heal():
    with one_thread() as limit:
        pass
    return limit, torch.get_num_threads()


def test_a_thread_that_is_born_in_a_block_gets_the_number_from_before():
    with ThreadPoolExecutor(1) as young, ThreadPoolExecutor(1) as late:
        with one_thread():
            assert young.submit(torch.get_num_threads).result() == 1  # inherited
            assert late.submit(heal).result() == (3, 3)
        assert young.submit(heal).result() == (3, 3)


def test_small_work_has_one_thread_and_large_work_the_free_cores(monkeypatch):
    with free_cores(2, monkeypatch):
        with use_threads(SMALL - 1):
            assert torch.get_num_threads() == 1
        with use_threads(SMALL):
            assert torch.get_num_threads() == 2
    with free_cores(8, monkeypatch), use_threads(SMALL):
        assert torch.get_num_threads() == 3


def test_results_come_in_order_from_workers_with_one_torch_thread():
    names = set()

    def look(n):
        names.add(threading.current_thread().name)
        return n, torch.get_num_threads()

    with one_thread():
        ask_new_thread(lambda: torch.set_num_threads(3))  # what new threads inherit
        assert list(run_in_order(look, range(20), 3)) == [(n, 1) for n in range(20)]
        assert all(name.startswith("regard") for name in names)
        names.clear()
        assert list(run_in_order(look, range(3), 1)) == [(n, 1) for n in range(3)]
        assert names == {threading.current_thread().name}
        with pytest.raises(ZeroDivisionError):
            list(run_in_order(lambda n: 1 // n, [1, 0, 1], 2))


def watch_kernel(monkeypatch):
    """Return the list of torch's threads in every call of the fused kernel."""
    seen, run = [], tiles.attend_part

    def look(*arguments, **options):
        seen.append(torch.get_num_threads())
        return run(*arguments, **options)

    monkeypatch.setattr(tiles, "attend_part", look)
    return seen


def test_the_engine_has_the_threads_that_a_call_is_worth(monkeypatch):
    seen = watch_kernel(monkeypatch)
    small, large = torch.randn(1, 2, 10, 8), torch.randn(1, 2, 1100, 8)
    with free_cores(2, monkeypatch):
        for x, expected in ((small, 1), (large, 2)):
            attend(x, x, x, causal())
            assert (seen.pop(), torch.get_num_threads()) == (expected, 3)
    with free_cores(1, monkeypatch):
        attend(large, large, large, causal())
        assert seen.pop() == 1
    monkeypatch.setattr(tiles, "attend_part", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        attend(small, small, small, causal())


def test_the_backward_pass_has_them_too(monkeypatch):
    seen, run = [], tiles.differentiate_part

    def look(*arguments, **options):
        seen.append(torch.get_num_threads())
        return run(*arguments, **options)

    monkeypatch.setattr(tiles, "differentiate_part", look)
    x = torch.randn(1, 2, 10, 8, requires_grad=True)
    attend(x, x, x, causal()).out.sum().backward()
    assert seen == [1]


def test_a_walk_has_as_many_workers(monkeypatch):
    asked = []
    real = tile_walk.run_in_order

    def look(function, items, workers):
        asked.append(workers)
        return real(function, items, workers)

    monkeypatch.setattr(tile_walk, "run_in_order", look)
    record = make_record()
    tile_walk.walk(record, ColumnSums())
    monkeypatch.setattr(threads, "SMALL", 40 * 40 * 4 * 16)
    with free_cores(2, monkeypatch):
        tile_walk.walk(record, ColumnSums())
        tile_walk.walk(record, ColumnSums(), heads=(0,))
        tile_walk.walk(record, ColumnSums(), workers=5)
    assert asked == [1, 2, 1, 5]


@pytest.mark.parametrize("compute", [make_table, make_page], ids=["table", "page"])
def test_no_number_of_threads_changes_a_bit(monkeypatch, compute):
    records = tuple(make_record(70) for _ in range(3))
    records = tuple(
        Record(**vars(x) | {"name": f"layer.{n}"}) for n, x in enumerate(records)
    )
    recording = Recording(model="Tiny", records=records, sequences=(0,) * 3)
    monkeypatch.setattr(threads, "SMALL", 1)
    found = []
    for free in (1, 3):
        with free_cores(free, monkeypatch):
            made = compute(recording)
            found.append(made.html if compute is make_page else made.rows.tobytes())
    assert found[0] == found[1]


def test_the_loop_of_an_atlas_leaves_torch_its_threads(monkeypatch):
    seen = []

    class Worker:
        def __init__(self, plan, *, threads):
            assert threads is None  # it would be set for good

        def __call__(self, shard):
            seen.append(torch.get_num_threads())
            return b""

    monkeypatch.setattr(runners, "open_worker", Worker)
    for threads_, expected in ((1, 1), (None, 3)):
        crew = runners.RunnerOptions(runner="loop", threads=threads_)
        for _ in crew.run(None, [1, 2]):
            assert torch.get_num_threads() == 3  # the caller's turn
        assert seen == [expected] * 2
        seen.clear()
