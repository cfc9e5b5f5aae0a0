"""The server behind the map: what it gives, to whom, and that it goes away."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import torch

from regard.errors import OptionError
from regard.masks.patterns import causal
from regard.recording.record import Record, Recording
from regard.seen import Seen
from regard.show import server as module
from regard.show.log_codes import decode
from regard.show.server import start_server
from regard.show.server_address import bind_door, is_local, name_host

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"'`${1}\\",
    "\u202eright to left\u2066",
    "\u200b\u200d\ufeff",
    "\ud83d",  # half an emoji
    "\ude00",
    "\udcff\udc80",  # bytes that are no UTF-8
    "\x00\x1b[2J\u2028\u2029",
    "long" * 2_500,
)


def make_recording(n=300, texts=HOSTILE):
    """Return a recording of two heads, and the weights of the second."""
    rng = np.random.default_rng(3)
    q, k = rng.normal(size=(2, n, 8)), rng.normal(size=(1, n, 8))
    logits = np.where(
        np.tri(n, dtype=bool), np.einsum("hid,jd->hij", q, k[0]), -math.inf
    )
    lse = np.log(np.exp(logits).sum(-1))
    arrays = {"q": q, "k": k, "lse": lse}
    arrays = {name: torch.from_numpy(x) for name, x in arrays.items()}
    at = torch.arange(n)
    record = Record(
        name="model.layers.0",
        scale=1.0,
        q_positions=at,
        k_positions=at,
        mask=causal(),
        **arrays,
    )
    recording = Recording(
        model="Tiny",
        records=(record,),
        sequences=(0,),
        tokens=(tuple(range(len(texts))),),
        texts=(texts,),
    )
    return recording, np.exp(logits - lse[..., None])[1]


RECORDING, WEIGHTS = make_recording()
HEAD = {"sequence": 0, "layer": 0, "head": 1}


@pytest.fixture(scope="module")
def running():
    with start_server(RECORDING) as it:
        yield it


@pytest.fixture
def client(running):
    parts = urlsplit(running.url)
    base, token = f"http://{parts.netloc}", parts.query.removeprefix("token=")
    with httpx.Client(base_url=base, params={"token": token}, timeout=30) as it:
        yield it


def talk(url, text):
    """Send bytes as they are and return the answer up to its end."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as wire:
        wire.sendall(text.replace("\r\n", "\r\nConnection: close\r\n", 1).encode())
        data = b""
        while part := wire.recv(65_536):
            data += part
    return data.decode("latin-1")


def test_the_page_sets_a_cookie_that_opens_the_rest(running):
    parts = urlsplit(running.url)
    assert re.fullmatch(r"token=[\w-]{43}", parts.query)
    assert parts.hostname == "127.0.0.1"
    with httpx.Client(base_url=f"http://{parts.netloc}") as client:
        assert client.get("/api/meta").status_code == 403
        page = client.get(running.url)
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "assets/start.js" in page.text
        cookie = page.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert "regard-" + str(parts.port) in cookie
        assert client.get("/api/meta").status_code == 200


def test_the_page_has_no_script_or_style_of_its_own():
    page = (module.ASSETS / "index.html").read_text("utf-8")
    assert re.search(r'<script[^>]*type="module"[^>]*src="[./]*assets/start.js"', page)
    assert re.search(r'<link[^>]*href="[./]*assets/map.css"', page)
    assert not re.search(r"<script(?![^>]*\ssrc=)", page)
    assert not re.search(r"<script[^>]*>[^<]", page)
    assert not re.search(r"<style|\sstyle=|\son\w+=|https?://", page)


def test_every_answer_has_the_safe_headers(client):
    for path in ("/", "/api/meta", "/api/tile", "/nothing"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith(
            "default-src 'none'; script-src 'self'; style-src 'self'; "
            "img-src 'self' data: blob:; connect-src 'self'"
        )
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers
    refused = client.get("/", params={"token": "x"})
    assert refused.headers["content-security-policy"] == policy


def test_one_request_brings_all_scripts(running):
    found = httpx.get(running.url.replace("/?", "/assets/start.js?"))
    assert found.headers["content-type"] == "text/javascript; charset=utf-8"
    assert not re.search(r"^import ", found.text, re.MULTILINE)
    for name in ("class Page", "class Gallery", "class Scatter", "class TextView"):
        assert name in found.text


def test_assets_come_from_a_table(running, tmp_path, monkeypatch):
    for name in ("page.js", "map.css", "index.html", "secret.txt"):
        (tmp_path / name).write_text(f"this is {name}")
    monkeypatch.setattr(module, "ASSETS", tmp_path)
    with start_server(RECORDING) as other:
        for name, kind in (("page.js", "text/javascript"), ("map.css", "text/css")):
            url = other.url.replace("/?", f"/assets/{name}?")
            answer = httpx.get(url)
            assert answer.text == f"this is {name}"
            assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        for name in ("secret.txt", "index.html", "page.js/", "../page.js", ""):
            answer = httpx.get(other.url.replace("/?", f"/assets/{name}?"))
            assert answer.status_code == 404, name
        assert httpx.get(other.url.replace("/?", "/page.js?")).status_code == 404


@pytest.mark.parametrize("how", ["max", "mass"])
@pytest.mark.parametrize("level", [0, 1, 3])
def test_a_tile_is_the_definition(client, level, how):
    side, n = 2**level, 300
    place = HEAD | {"level": level, "x": 0, "y": 0, "how": how}
    answer = client.get("/api/tile", params=place)
    rows, columns = (int(answer.headers[f"X-{x}"]) for x in ("Rows", "Columns"))
    assert (rows, columns) == (min(256, math.ceil(n / side)),) * 2
    assert (answer.headers["X-How"], answer.headers["X-Exact"]) == (how, "1")
    assert answer.headers["content-type"] == "application/octet-stream"
    codes = np.frombuffer(answer.content, "<u2").reshape(rows, columns)
    for i in range(0, rows, 7):
        for j in range(0, columns, 5):
            cells = WEIGHTS[i * side : (i + 1) * side, j * side : (j + 1) * side]
            if j * side > min((i + 1) * side, n) - 1:
                assert codes[i, j] == 0
                continue
            pixel = cells.max() if how == "max" else cells.sum(1).mean()
            assert decode(codes)[i, j] == pytest.approx(pixel, rel=5e-4, abs=1e-9)


def test_ragged_tiles_have_the_pixels_that_exist(client):
    answer = client.get("/api/tile", params=HEAD | {"level": 0, "x": 0, "y": 1})
    assert (answer.headers["X-Rows"], answer.headers["X-Columns"]) == ("44", "256")
    assert answer.headers["X-How"] == "max"
    codes = np.frombuffer(answer.content, "<u2").reshape(44, 256)
    weights = WEIGHTS[256:, :256]
    large = weights > 2e-9
    assert np.abs(decode(codes)[large] / weights[large] - 1).max() < 5e-4


def test_rows_and_columns_come_as_json(client):
    row = client.get("/api/row", params=HEAD | {"query": 200}).json()
    best = np.argsort(-WEIGHTS[200])[:20]
    assert [x["index"] for x in row["top"]] == best.tolist()
    assert [x["weight"] for x in row["top"]] == pytest.approx(
        WEIGHTS[200, best].tolist()
    )
    assert row["total"] == pytest.approx(1)
    seen = WEIGHTS[200, :201]
    assert row["entropy"] == pytest.approx(-(seen * np.log2(seen)).sum())
    column = client.get("/api/column", params=HEAD | {"key": 7}).json()
    assert [x["index"] for x in column["top"]] == np.argsort(-WEIGHTS[:, 7])[
        :20
    ].tolist()
    assert column["total"] == pytest.approx(WEIGHTS[:, 7].sum())


def test_the_gallery_has_every_head(client):
    answer = client.get("/api/gallery", params={"sequence": 0, "layer": 0})
    shape = [int(answer.headers[f"X-{x}"]) for x in ("Heads", "Rows", "Columns")]
    assert shape == [2, 38, 38]
    codes = np.frombuffer(answer.content, "<u2").reshape(shape)
    assert decode(codes)[1, 20, 3] == pytest.approx(
        WEIGHTS[160:168, 24:32].max(), rel=5e-4
    )
    assert codes[1, 3, 20] == 0


def test_hostile_texts_survive_as_json(client):
    answer = client.get("/api/meta")
    assert answer.headers["content-type"] == "application/json"
    assert answer.content.isascii()
    meta = json.loads(answer.content)
    (sequence,) = meta["sequences"]
    assert sequence["tokens"] == list(range(10))
    assert sequence["texts"] == list(HOSTILE)
    assert (sequence["count"], sequence["blocks"]) == (10, [])
    assert meta["model"] == "Tiny"
    assert meta["records"][0]["causal"] is True


def test_the_table_arrives(client):
    until = time.monotonic() + 30
    while not (table := client.get("/api/meta").json()["table"]):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert [row["head"] for row in table] == [0, 1]
    assert table[1]["sink"] == pytest.approx(WEIGHTS[:, 0].mean(), rel=1e-5)
    assert table[0]["induction"] is None


@pytest.mark.parametrize(
    ("path", "asked", "status", "words"),
    [
        ("/api/tile", {}, 400, "level is not given"),
        ("/api/tile", {"level": "-1"}, 400, "level='-1', expected a whole number"),
        ("/api/tile", {"level": "1e3"}, 400, "expected a whole number"),
        ("/api/tile", {"level": "٣"}, 400, "expected a whole number"),
        ("/api/tile", {"level": "9" * 5000}, 400, "expected a whole number"),
        ("/api/tile", {"level": ["1", "2"]}, 400, "level is given 2 times"),
        ("/api/tile", {"level": 99}, 404, "no tile x=0 y=0 at level 99"),
        ("/api/tile", {"level": 0, "x": 2}, 404, "no tile x=2"),
        ("/api/tile", {"level": 0, "how": "<b>"}, 400, "how='<b>', expected"),
        ("/api/tile", {"level": 0, "head": 2}, 404, "no head 2 in layer 0"),
        ("/api/row", {"query": 300}, 404, "no query 300, expected 0 to 299"),
        ("/api/row", {"key": 3}, 400, "query is not given"),
        ("/api/column", {"key": 300}, 404, "no key 300"),
        ("/api/gallery", {"layer": 1}, 404, "no layer 1"),
        ("/api/text", {"last": 1}, 400, "first is not given"),
        ("/api/text", {"first": 0, "last": 10}, 404, "no token 10"),
        ("/api/nothing", {}, 404, "nothing at this path"),
        ("/api/meta/", {}, 404, "nothing at this path"),
    ],
)
def test_errors_are_a_sentence(client, path, asked, status, words):
    place = HEAD | {"x": 0, "y": 0} | asked
    answer = client.get(path, params=place)
    assert answer.status_code == status
    assert words in answer.json()["error"]
    assert list(answer.json()) == ["error"]


def test_what_goes_wrong_inside_is_said_and_logged(monkeypatch, caplog):
    monkeypatch.setattr(module.MapSource, "row", lambda *_: 1 / 0)
    with start_server(RECORDING) as it:
        url = it.url.replace("/?", "/api/row?sequence=0&layer=0&head=0&query=0&")
        answer = httpx.get(url)
    assert answer.status_code == 500
    assert answer.json()["error"] == "ZeroDivisionError: division by zero"
    assert "the map could not answer" in caplog.text


def test_what_is_not_ready_is_to_be_asked_again(monkeypatch):
    errors = [CancelledError(), module.UnfinishedError("not yet.")]

    def refuse(*_):
        raise errors.pop()

    monkeypatch.setattr(module.MapSource, "gallery", refuse)
    with start_server(RECORDING) as it:
        url = it.url.replace("/?", "/api/gallery?sequence=0&layer=0&")
        answers = [httpx.get(url) for _ in range(2)]
    assert [x.status_code for x in answers] == [503, 503]
    assert answers[0].json() == {"error": "not yet."}


TRUE = "http://{host}"


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"Host": "localhost:{port}"}, True),
        ({"Host": "localhost:{port}", "Origin": "http://localhost:{port}"}, True),
        ({"Origin": TRUE}, True),
        ({"Sec-Fetch-Site": "cross-site"}, True),  # a link to the printed URL
        ({"Host": "evil.example:{port}"}, False),
        ({"Host": "127.0.0.1"}, False),
        ({"Host": "127.0.0.1:1"}, False),
        ({"Host": "127.0.0.1:{port}.evil.example"}, False),
        ({"Host": "127.0.0.1.evil.example:{port}"}, False),
        ({"Host": ""}, False),
        ({"Origin": "http://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "https://{host}"}, False),
        ({"Origin": "http://localhost:{port}"}, False),  # not the Host that it names
        ({"Origin": "http://127.0.0.1:1"}, False),
        ({"Origin": ""}, False),
    ],
)
def test_other_hosts_and_origins_are_refused(running, headers, allowed):
    parts = urlsplit(running.url)
    given = {"Host": parts.netloc} | {
        name: text.format(host=parts.netloc, port=parts.port)
        for name, text in headers.items()
    }
    lines = "".join(f"{name}: {text}\r\n" for name, text in given.items())
    target = f"/api/meta?{parts.query}"
    answer = talk(running.url, f"GET {target} HTTP/1.1\r\n{lines}\r\n")
    assert answer.startswith("HTTP/1.1 200" if allowed else "HTTP/1.1 403")
    if not allowed:
        assert "Tiny" not in answer
        assert '{"error":"' in answer


def test_two_hosts_are_refused(running):
    parts = urlsplit(running.url)
    hosts = f"Host: {parts.netloc}\r\nHost: {parts.netloc}\r\n"
    answer = talk(running.url, f"GET /api/meta?{parts.query} HTTP/1.1\r\n{hosts}\r\n")
    assert answer.startswith("HTTP/1.1 40")


@pytest.mark.parametrize(
    "query",
    [
        "",
        "token=",
        "token=x",
        "token={token}x",
        "token={short}",
        "TOKEN={token}",
        "token={token}&token=x",
        "token=%ff%00",
        "token=%F0%9F%98%80",
    ],
)
def test_wrong_tokens_are_refused_everywhere(running, query):
    parts = urlsplit(running.url)
    token = parts.query.removeprefix("token=")
    query = query.format(token=token, short=token[:-1])
    for path in ("/", "/api/meta", "/assets/page.js", "/nothing"):
        answer = talk(
            running.url, f"GET {path}?{query} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n"
        )
        assert answer.startswith("HTTP/1.1 403")
        assert "Open the URL that was printed" in answer
        assert "set-cookie" not in answer.lower()
        assert token not in answer


@pytest.mark.parametrize(
    ("site", "status"),
    [("same-origin", 200), ("none", 200), ("cross-site", 403), ("same-site", 403)],
)
def test_a_cookie_is_not_enough_for_another_site(running, site, status):
    parts = urlsplit(running.url)
    token = parts.query.removeprefix("token=")
    # a neighbour's odd cookie does not hide ours
    cookie = f'a[b]="x; y{{}}=1; regard-{parts.port}={token}'
    answer = talk(
        running.url,
        f"GET /api/meta HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Sec-Fetch-Site: {site}\r\nCookie: {cookie}\r\n\r\n",
    )
    assert answer.startswith(f"HTTP/1.1 {status}")


@pytest.mark.parametrize("cookie", ["regard-{port}=x", "regard-1={token}", "x={token}"])
def test_a_wrong_cookie_is_refused(running, cookie):
    parts = urlsplit(running.url)
    cookie = cookie.format(port=parts.port, token=parts.query.removeprefix("token="))
    host = f"Host: {parts.netloc}\r\n"
    text = f"GET /api/meta HTTP/1.1\r\n{host}Cookie: {cookie}\r\n\r\n"
    assert talk(running.url, text).startswith("HTTP/1.1 403")


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../server.py",
        "/assets/../../record.py",
        "/assets/%2e%2e/server.py",
        "/assets/..%2fserver.py",
        "/assets/..\\server.py",
        "/assets//etc/passwd",
        "//etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/assets/index.html%00.js",
        "/assets/",
        "/assets",
        "/./",
        "/assets/assets/page.js",
        "http://evil.example/",
        "*",
    ],
)
def test_path_tricks_lead_nowhere(running, path):
    parts = urlsplit(running.url)
    answer = talk(
        running.url,
        f"GET {path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n",
    )
    assert answer.startswith("HTTP/1.1 404")
    assert answer.endswith('{"error":"there is nothing at this path."}')


def test_small_answers_are_sent_at_once(running, client):
    client.get("/api/row", params=HEAD | {"query": 3})
    wires = [
        x.transport.get_extra_info("socket")
        for x in running.server.server_state.connections
    ]
    assert wires
    for wire in wires:
        assert wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("verb", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_only_get_is_answered(client, verb):
    assert client.request(verb, "/api/meta").status_code == 405


def test_a_huge_request_head_is_refused(running):
    parts = urlsplit(running.url)
    text = f"GET / HTTP/1.1\r\nHost: {parts.netloc}\r\nX: {'x' * 100_000}"
    try:
        answer = talk(running.url, text)
    except ConnectionError:  # dropped before all of it was sent
        return
    assert answer.startswith("HTTP/1.1 400")


def open_slow(url, n):
    """Return n connections that began a request and will not go on."""
    parts = urlsplit(url)
    wires = []
    for i in range(n):
        wires.append(socket.create_connection((parts.hostname, parts.port), timeout=20))
        if i % 3:  # one in three says nothing at all
            wires[-1].sendall(b"GET / HTTP/1.1\r\nHost:"[: 3 + i % 19])
    return wires


def is_dropped(wire):
    try:
        return wire.recv(1) == b""
    except ConnectionError:
        return True


def test_fifty_slow_clients_do_not_stop_a_good_one(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 1.0)
    with start_server(RECORDING) as it, ExitStack() as stack:
        begun = time.monotonic()
        wires = [stack.enter_context(x) for x in open_slow(it.url, 50)]
        url = it.url.replace("/?", "/api/row?sequence=0&layer=0&head=0&query=9&")
        for _ in range(5):
            asked = time.monotonic()
            assert httpx.get(url).status_code == 200
            assert time.monotonic() - asked < 2
        assert len(it.server.server_state.connections) >= 50 or (
            time.monotonic() - begun > 1
        )
        assert all(map(is_dropped, wires))
        assert time.monotonic() - begun < 15
        assert httpx.get(url).status_code == 200


def test_of_too_many_clients_the_idle_ones_go(monkeypatch):
    monkeypatch.setattr(module, "CLIENTS", 20)
    with start_server(RECORDING) as it, ExitStack() as stack:
        wires = [stack.enter_context(x) for x in open_slow(it.url, 50)]
        assert httpx.get(it.url.replace("/?", "/api/meta?")).status_code == 200
        assert len(it.server.server_state.connections) <= 21
        assert all(map(is_dropped, wires[:25]))


def test_a_client_that_does_not_read_is_dropped(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.3)
    large, _ = make_recording(texts=("x" * 20_000_000,))
    with start_server(large) as it, socket.socket() as wire:
        parts = urlsplit(it.url)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.connect((parts.hostname, parts.port))
        head = f"GET /api/meta?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n"
        wire.sendall(head.encode())
        until = time.monotonic() + 20
        while not it.server.server_state.connections:
            assert time.monotonic() < until
        while it.server.server_state.connections:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_an_answer_may_take_more_time_than_a_client_may_be_silent(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.1)
    slow = module.MapSource.row

    def row(*given):
        time.sleep(1)
        return slow(*given)

    monkeypatch.setattr(module.MapSource, "row", row)
    with start_server(RECORDING) as it:
        url = it.url.replace("/?", "/api/row?sequence=0&layer=0&head=0&query=9&")
        assert httpx.get(url).status_code == 200


def test_it_ends_with_all_its_threads():
    before = set(threading.enumerate())
    with start_server(RECORDING) as it:
        httpx.get(it.url.replace("/?", "/api/meta?"))
    assert set(threading.enumerate()) <= before
    with pytest.raises(httpx.ConnectError):
        httpx.get(it.url)


def test_two_servers_have_two_tokens_and_two_cookies():
    with (
        start_server(RECORDING) as one,
        start_server(RECORDING) as two,
        httpx.Client() as client,
    ):
        assert one.url != two.url
        for it in (one, two):
            client.get(it.url)
        for it in (one, two):
            assert client.get(it.url.split("?")[0] + "api/meta").status_code == 200
        wrong = one.url.split("?")[0] + "?" + two.url.split("?")[1]
        assert client.get(wrong).status_code == 403


SERVE = """
import sys, webbrowser
from regard.seen import open_seen
from regard.show.server import serve
webbrowser.open = lambda url: print("browser at", url, flush=True)
serve(open_seen(sys.argv[1]).recording, browser=len(sys.argv) > 2)
print("ended")
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["idle", "in a pass"])
def test_ctrl_c_leaves_no_process_and_no_file(tmp_path, moment):
    n = 300 if moment == "idle" else 6000
    at, rng = torch.arange(n), torch.Generator().manual_seed(0)
    arrays = {name: torch.randn(8, n, 64, generator=rng) for name in "qk"}
    record = replace(
        RECORDING.records[0],
        **arrays,
        lse=torch.zeros(8, n),
        q_positions=at,
        k_positions=at,
    )
    recording = replace(RECORDING, records=(record,), texts=(("a",),))
    path = tmp_path / "run.regard"
    Seen(recording).save(path)
    command = [sys.executable, "-c", SERVE, path.name]
    process = subprocess.Popen(
        command + ["browser"] * (moment == "idle"),
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        line = process.stdout.readline()
        url = line.split()[-1]
        assert line == f"The map is at {url}\n"
        assert httpx.get(url, timeout=30).status_code == 200
        process.send_signal(signal.SIGINT)
        with process.stdout, process.stderr:
            out, wrong = process.stdout.read(), process.stderr.read()
        process.wait(30)
    finally:
        process.kill()
    assert wrong == ""
    assert out.splitlines()[-1] == "ended"
    assert ("browser at " + url in out) == (moment == "idle")
    assert process.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert [x.name for x in Path(tmp_path).iterdir()] == ["run.regard"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_missing_library_is_named_with_what_to_install():
    code = "import sys; sys.modules['uvicorn'] = None; import regard.show.server"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    words = 'ImportError: the map needs uvicorn: pip install "regard[serve]"'
    assert run.stderr.splitlines()[-1] == words


def test_it_listens_where_it_is_told():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with module.open_door(RECORDING, None, "localhost", port) as (_, door, url):
        assert door.getsockname()[1] == port
        assert urlsplit(url).port == port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(OptionError, match=rf"127.0.0.1 port {port}.*another port"):
            bind_door("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("no.such.host.invalid", 0, "is no address of this machine"),
        ("203.0.113.7", 0, "cannot listen on 203.0.113.7 port 0"),
        ("127.0.0.1", 65_536, "expected 0 for a free one, up to 65535"),
        ("127.0.0.1", -1, "expected 0 for a free one"),
    ],
)
def test_an_address_that_cannot_be_had_is_refused_in_a_sentence(host, port, words):
    with pytest.raises(OptionError, match=words):
        bind_door(host, port)


def test_the_url_names_the_machine_if_it_listens_everywhere():
    assert name_host("0.0.0.0") == name_host("::") == socket.gethostname()
    assert (name_host("127.0.0.1"), name_host("::1")) == ("127.0.0.1", "[::1]")
    assert [is_local(x) for x in ("127.0.0.1", "::1", "0.0.0.0", "10.0.0.3")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_host_in_numbers_is_ours_only_if_it_listens_everywhere(everywhere):
    name = socket.gethostname() if everywhere else "127.0.0.1"
    guard = module.Guard(None, "token", name, "8000")
    for host in (f"{name}:8000", "localhost:8000", "127.0.0.1:8000"):
        assert guard.knows(host)
    for host in ("10.0.0.3:8000", "[fd00::3]:8000"):
        assert guard.knows(host) == everywhere
    for host in (
        "evil.example:8000",
        "10.0.0.3:8001",
        "10.0.0.3",
        "",
        "10.0.0.3.evil:8000",
    ):
        assert not guard.knows(host)
