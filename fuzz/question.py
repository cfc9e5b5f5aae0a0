r"""Hunt: what anyone may send to the server of a map, as a path and headers.

    /api/tile?sequence=0&layer=0&head=1&level=0&x=0&y=0&how=max&token=…
    host: 127.0.0.1:8000

    text ─▶ Guard ─▶ answer ─▶ 200, or 400, 403, 404, 405, 503 with one sentence

Never 500, and never 200 without the token and the right Host.

Next: exercise.py
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qsl, unquote

import numpy as np
import torch
from damage import damage_words
from hunt import Target, main

from regard.errors import FileError
from regard.masks.patterns import causal
from regard.recording.record import Record, Recording
from regard.show.map_requests import NAMES
from regard.show.map_source import MapSource
from regard.show.server import make_app

TOKEN, PORT, SIZE = "sesame", 8000, 300
REFUSED = (400, 403, 404, 405, 503)
WORDS: tuple[str, ...] = ()
WORDS += ("sequence=", "layer=", "head=", "level=", "query=", "key=", "how=", "x=")
WORDS += ("y=",)
WORDS += ("max", "mass", "0", "1", "-1", "299", "300", "999999999", "1e3", "٣", "%00")
WORDS += (f"token={TOKEN}", "&", "=", "?", "/", "..", "%2e", "\n", "host: ", "cookie: ")
WORDS += (
    f"127.0.0.1:{PORT}",
    f"localhost:{PORT}",
    f"regard-{PORT}={TOKEN}",
    "origin: ",
)
WORDS += (f"http://127.0.0.1:{PORT}", "sec-fetch-site: cross-site", "/assets/page.js")
WORDS += tuple(f"/api/{name}?" for name in NAMES)


def make_source() -> MapSource:
    """Return a source of one small head, all of whose levels are quick."""
    rng, at = np.random.default_rng(0), torch.arange(SIZE)
    q, k = (torch.from_numpy(rng.normal(size=(n, SIZE, 4))) for n in (2, 1))
    logits = torch.where(torch.ones(SIZE, SIZE).tril() > 0, q @ k.mT, -torch.inf)
    record = Record(
        name="layers.0",
        q=q,
        k=k,
        lse=logits.logsumexp(-1),
        scale=1.0,
        q_positions=at,
        k_positions=at,
        mask=causal(),
    )
    texts = (tuple(f"<b>{i}\x1b" for i in range(SIZE)),)
    return MapSource(
        Recording(model="Tiny", records=(record,), sequences=(0,), texts=texts)
    )


APP = make_app(make_source(), TOKEN, f"127.0.0.1:{PORT}", ThreadPoolExecutor(1))
LOOP = asyncio.new_event_loop()  # in a thread: a test may have a loop of its own
threading.Thread(target=LOOP.run_forever, daemon=True).start()


def check(data: bytes) -> None:
    """Ask; a refusal is raised as one, with its sentence."""
    scope = read_scope(data)
    asked = asyncio.run_coroutine_threadsafe(ask(scope), LOOP)
    status, headers, body = asked.result()
    assert headers[b"x-content-type-options"] == b"nosniff"
    assert b"default-src 'none'" in headers[b"content-security-policy"]
    assert TOKEN.encode() not in body or TOKEN.encode() in data
    if status == 200:
        check_allowed(scope)
        if headers[b"content-type"] == b"application/json":
            json.loads(body)
        return
    assert status in REFUSED, (status, body)
    raise FileError(json.loads(body)["error"])  # judged as any refusal


def check_allowed(scope: dict[str, Any]) -> None:
    """Hold an answer against a plain reading of who may have one."""
    headers = [(a, b.decode("latin-1")) for a, b in scope["headers"]]
    hosts = [b for a, b in headers if a == b"host"]
    assert hosts in ([f"127.0.0.1:{PORT}"], [f"localhost:{PORT}"])
    assert all(b == f"http://{hosts[0]}" for a, b in headers if a == b"origin")
    asked = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    given = [x for name, x in asked if name == "token"]
    cookies = [b for a, b in headers if a == b"cookie"]
    assert given or any(re.search(rf"regard-{PORT}\s*=\s*{TOKEN}", x) for x in cookies)
    assert all(x == TOKEN for x in given)
    assert scope["method"] == "GET"


def read_scope(data: bytes) -> dict[str, Any]:
    """Return what uvicorn would make of a path, and of headers line by line."""
    line, *rest = data.decode("latin-1").split("\n")
    method, _, target = line.rpartition(" ")
    path, _, query = target.partition("?")
    pairs = [x.partition(":")[::2] for x in rest if ":" in x]
    return {
        "type": "http",
        "method": method or "GET",
        "path": unquote(path),
        "query_string": query.encode("latin-1"),
        "headers": [
            (a.strip().lower().encode("latin-1"), b.strip().encode("latin-1"))
            for a, b in pairs
        ],
    }


async def ask(scope: dict[str, Any]) -> tuple[int, dict[bytes, bytes], bytes]:
    """Return the status, headers and body of an answer."""
    heard: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        heard.append(message)

    await APP(scope, receive, send)
    start, *bodies = heard
    body = b"".join(x.get("body", b"") for x in bodies)
    return start["status"], dict(start["headers"]), body


TARGET = Target(
    "question", check, damage_words(WORDS, "latin-1", "replace"), longest=2**11
)
if __name__ == "__main__":
    main(TARGET)
