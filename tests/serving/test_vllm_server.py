"""A vLLM server that records the requests that ask for it: real server, real clients."""

import http.client
import importlib.util
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vLLM has an environment of its own: python3 .ci/environment.py --serving",
        allow_module_level=True,
    )
from served_model import (
    ask,
    ask_many,
    compare,
    make_body,
    save_model,
    serve,
    wait_for_recordings,
)

import regard
from regard.recording.file import open_recording
from regard.recording.folder import RecordingFolder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """A server with a folder of recordings; return its port and the folder."""
    folder = tmp_path_factory.mktemp("served")
    with serve(model, folder / "log", recordings=folder / "r", files=400) as (port, _):
        yield port, folder / "r"


def forget(folder):
    """Delete what earlier tests recorded."""
    RecordingFolder(path=folder).prune(0)


def test_every_request_that_asks_is_recorded_and_no_other(server, model):
    port, folder = server
    asked = ask_many(port, 1000, clients=16, share=0.05)
    files = wait_for_recordings(folder, len(asked))
    assert 20 < len(asked) == len(files)
    assert compare(files, asked, model) < 1e-5
    assert {x.suffix for x in folder.iterdir() if x.name != ".lock"} == {".regard"}


def test_a_chat_is_labelled_and_can_be_looked_at(server):
    port, folder = server
    forget(folder)
    messages = [{"role": "user", "content": "w1 w2 w3"}]
    body = {
        "model": "small",
        "messages": messages,
        "max_tokens": 4,
        "vllm_xargs": {"regard": 1},
    }
    status, answer = ask(port, body, path="/v1/chat/completions")
    assert status == 200
    (file,) = wait_for_recordings(folder, 1)
    assert file.name.startswith(answer["id"])
    seen = regard.open(file)
    assert seen.recording.texts[0][:5] == ("user", "w1", "w2", "w3", "assistant")
    assert len(seen.recording.tokens[0]) == 5 + 4 - 1
    assert len(seen.table()) == 8
    page = file.with_suffix(".html")
    seen.page(page)
    assert "assistant" in page.read_text()
    page.unlink()


def test_each_sample_of_a_prompt_is_a_recording(server):
    port, folder = server
    forget(folder)
    body = make_body([5, 6, 7], record=True, n=3, temperature=1.0)
    status, answer = ask(port, body)
    assert status == 200
    files = wait_for_recordings(folder, 3)
    found = {open_recording(x).tokens[0] for x in files}
    expected = {(5, 6, 7, *x["token_ids"][:-1]) for x in answer["choices"]}
    assert found == expected


NAMES = ["../../evil", "/etc/evil", "..%2f..%2fevil", "x" * 3000, "-rf", ".", "a b;c"]


@pytest.mark.parametrize("name", NAMES, ids=lambda x: x[:20])
def test_a_client_cannot_choose_a_path(server, name):
    port, folder = server
    forget(folder)
    around = {x.name for x in folder.parent.iterdir()}
    body = make_body([5, 6, 7], record=True)
    for _ in range(2):  # the same name twice makes two recordings
        status, _ = ask(port, body, headers={"X-Request-Id": name})
        assert status == 200
    files = wait_for_recordings(folder, 2)
    assert len(files) == 2
    assert {x.name for x in folder.parent.iterdir()} == around
    assert all(open_recording(x, verify=True).tokens for x in files)


@pytest.mark.parametrize(
    "value", [0, "", "../x", "qkv", 2, -1, 1e300, ["qk"], ["qk"] * 100, {"qk": 1}, None]
)
def test_a_request_that_asks_wrongly_harms_no_other_one(server, value):
    port, folder = server
    forget(folder)
    body = make_body([5, 6, 7]) | {"vllm_xargs": {"regard": value}}
    with ThreadPoolExecutor(4) as pool:
        wrong = [pool.submit(ask, port, body) for _ in range(3)]
        right = pool.submit(ask, port, make_body([8, 9], record=True))
        assert right.result()[0] == 200
        assert {x.result()[0] for x in wrong} <= {200, 400, 422}
    (file,) = wait_for_recordings(folder, 1)
    assert open_recording(file).tokens[0][:2] == (8, 9)
    time.sleep(0.3)
    assert len(list(folder.glob("*.regard"))) == 1


def test_clients_that_leave_harm_nothing(server):
    port, folder = server
    forget(folder)
    body = make_body([5, 6, 7], new=400, record=True, stream=True)
    for wait in (0.0, 0.02, 0.1, 0.3):
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        head = {"Content-Type": "application/json"}
        link.request("POST", "/v1/completions", json.dumps(body), head)
        if wait:
            link.getresponse().read(100)
            time.sleep(wait)
        link.sock.close()
        link.close()
    status, answer = ask(port, make_body([8, 9], record=True))
    assert status == 200
    time.sleep(2)
    files = wait_for_recordings(folder, 1)
    kept = [open_recording(x, verify=True).tokens[0] for x in files]
    assert (8, 9, *answer["choices"][0]["token_ids"][:-1]) in kept
    assert all(x[:3] == (5, 6, 7) for x in kept if x[0] != 8)
    assert {x.suffix for x in folder.iterdir() if x.name != ".lock"} == {".regard"}


def test_the_limits_hold_and_a_killed_server_leaves_whole_files(model, tmp_path):
    folder = tmp_path / "r"
    count = 10_000 if os.environ.get("REGARD_SERVING") == "all" else 300
    with serve(model, tmp_path / "log", recordings=folder, files=30) as (port, _):
        ask_many(port, count, share=1.0)
        time.sleep(2)
        assert len(list(folder.glob("*.regard"))) == 30
        assert "--prune" in (tmp_path / "log").read_text()
    forget(folder)
    with (
        serve(model, tmp_path / "log", recordings=folder, files=5000) as (
            port,
            server,
        ),
        ThreadPoolExecutor(1) as pool,
    ):
        sent = pool.submit(ask_many, port, 2000, share=1.0)
        wait_for_recordings(folder, 20)
        os.killpg(server.pid, signal.SIGKILL)
        assert sent.exception() is not None
    files = sorted(folder.glob("*.regard"))
    assert len(files) >= 20
    for file in files:
        assert len(open_recording(file, verify=True).records) == 2
    RecordingFolder(path=folder).prune(5)
    assert {x.suffix for x in folder.iterdir() if x.name != ".lock"} == {".regard"}


def test_two_ranks_write_one_recording(model, tmp_path):
    options = ("--tensor-parallel-size", "2")
    folder = tmp_path / "r"
    with serve(
        model, tmp_path / "log", options=options, recordings=folder, bind="0|1"
    ) as (port, _):
        asked = ask_many(port, 60, share=0.3)
        files = wait_for_recordings(folder, len(asked))
        assert compare(files, asked, model) < 1e-5
    assert {x.suffix for x in folder.iterdir() if x.name != ".lock"} == {".regard"}


def test_nothing_is_recorded_unless_the_operator_wants_it(model, tmp_path):
    before = set(Path.cwd().iterdir())
    with serve(model, tmp_path / "log") as (port, _):
        asked = ask_many(port, 20, share=1.0)
    assert len(asked) == 20
    assert not list(tmp_path.rglob("*.regard"))
    assert set(Path.cwd().iterdir()) == before


def test_the_code_of_the_page_records_its_request(server):
    port, folder = server
    forget(folder)
    pages = Path(__file__).parents[2] / "docs" / "howto"
    text = (pages / "record-a-vllm-server.md").read_text("utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    code = code.replace("8000", str(port))
    code = code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "small")
    done = {}
    exec(compile(code, "page", "exec"), done)
    (file,) = wait_for_recordings(folder, 1)
    assert file.name.startswith(done["answer"].id)
