"""The map in a browser: a server that only this machine can reach.

    serve(recording)                            until Ctrl-C
    with start_server(recording) as running:    in a thread; running.url is the page

    request ─▶ Guard: Host, Origin, token ─▶ routes ─▶ MapSource ─▶ bytes

A recording holds the text that a model read, so only the page itself gets answers:

    another machine        cannot connect: the server listens on 127.0.0.1, or host=
    another user, program  does not know the token, which is in the printed URL
    another web page       sends another Origin; with DNS rebinding, another Host
    text of the recording  is sent as JSON or numbers; the CSP allows only our scripts

A client that sends or reads too slowly is dropped, so it cannot block others.

Next: page.py
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from regard.errors import OptionError, RegardError
from regard.recording.record import Recording
from regard.show.map_requests import NAMES, WHOLE, answer
from regard.show.map_source import MapSource, MissingError, UnfinishedError
from regard.show.script_bundle import ASSETS, join_modules
from regard.show.server_address import bind_door, is_local, is_numeric_host, name_host
from regard.show.zoom_levels import Sheet

try:
    import uvicorn
    from starlette.datastructures import MutableHeaders, QueryParams
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as missing:
    raise ImportError(
        f'the map needs {missing.name}: pip install "regard[serve]"'
    ) from missing

HOST = "127.0.0.1"
KINDS = {".js": "text/javascript", ".css": "text/css"}
START = "start.js"  # sent with all of its imports
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the token is in the URL
    "Cross-Origin-Resource-Policy": "same-origin",
}
THREADS = 32  # most of them wait for a pass
SECONDS = 5.0  # that a client may be inactive
CLIENTS = 256  # connections; if there are more, idle ones are closed
LONGEST = 32_768  # bytes of a request's headers
LOG = logging.getLogger("regard")


@dataclass(frozen=True)
class Running:
    """A server in a background thread."""

    url: str
    server: uvicorn.Server
    thread: threading.Thread


def serve(
    recording: Recording,
    *,
    browser: bool = False,
    host: str | None = None,
    port: int = 0,
) -> None:
    """Serve a recording until Ctrl-C.

    browser: also open the page in a browser
    host: the address to listen on; HOST by default, for this machine only
    port: 0 for any free port
    """
    console = Console()
    with (
        suppress(KeyboardInterrupt),  # uvicorn shuts down, then raises it again
        Progress(console=console, transient=True) as bars,
        open_door(recording, Bars(bars).report, host, port) as (server, door, url),
    ):
        page = url + read_address(recording)
        console.print(f"The map is at {page}", soft_wrap=True, highlight=False)
        console.print("It shows the text that the model read. Ctrl-C ends it.")
        if not is_local(door.getsockname()[0]):
            console.print("Other machines can open it too, with this address, in http.")
        if browser:
            webbrowser.open(page)
        server.run(sockets=[door])


def read_address(recording: Recording) -> str:
    """Return the URL fragment at which a recording opens; empty if it is not valid.

    A file is untrusted, and this becomes part of a URL.
    """
    place = recording.notes.get("address", "")
    known = isinstance(place, str) and re.fullmatch(r"[a-z]+=\w+(&[a-z]+=\w+)*", place)
    return f"#{place}" if known and len(place) < 100 else ""


@contextmanager
def start_server(recording: Recording) -> Iterator[Running]:
    """Serve a recording for the duration of the `with` block."""
    with open_door(recording, None) as (server, door, url):
        thread = threading.Thread(target=server.run, args=([door],), name="map")
        thread.start()
        try:
            yield Running(url, server, thread)
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def open_door(
    recording: Recording,
    report: Callable[[str, int, int], object] | None,
    host: str | None = None,
    port: int = 0,
) -> Iterator[tuple[uvicorn.Server, socket.socket, str]]:
    """Listen on a port, 0 for a free one; stop all jobs and close it on exit."""
    token = secrets.token_urlsafe(32)
    source = MapSource(recording, report=report)
    pool = ThreadPoolExecutor(THREADS, "answers")
    with bind_door(HOST if host is None else host, port) as door:
        door.listen(CLIENTS)  # early clients wait until the server is up
        address, port = door.getsockname()[:2]
        name = name_host(address)
        config = uvicorn.Config(
            make_app(source, token, f"{name}:{port}", pool),
            http=Patient,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=LONGEST,
        )
        try:
            yield uvicorn.Server(config), door, f"http://{name}:{port}/?token={token}"
        finally:
            source.close()
            pool.shutdown(cancel_futures=True)


def make_app(
    source: MapSource, token: str, place: str, pool: ThreadPoolExecutor
) -> ASGIApp:
    """Return the ASGI application: the routes, behind the guard.

    place: the host and port of the server, as in its URL
    """
    name, _, port = place.rpartition(":")
    assets = {x.name: x for x in ASSETS.iterdir() if x.suffix in KINDS}

    def show_page(_: QueryParams) -> Response:
        page = (ASSETS / "index.html").read_text("utf-8")
        shown = Response(page, media_type="text/html")
        shown.set_cookie(
            f"regard-{port}", token, httponly=True, samesite="strict", path="/"
        )
        return shown

    def show_answer(name: str, asked: QueryParams) -> Response:
        if name in WHOLE:  # not before: the first text would wait for it
            source.prepare()
        found = answer(source, name, read_once(asked))
        return send_sheet(found) if isinstance(found, Sheet) else send_json(found)

    answers: dict[str, Callable[[QueryParams], Response]] = {
        "/": show_page,
        **{f"/api/{name}": partial(show_answer, name) for name in NAMES},
    }

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        asset = assets.get(path.removeprefix("/assets/"))
        if path in answers:
            asked = QueryParams(scope["query_string"])
            loop = asyncio.get_running_loop()
            reply = await loop.run_in_executor(
                pool, answer_request, answers[path], asked
            )
        elif asset is not None and path.startswith("/assets/"):
            whole = asset.name == START  # with its imports: one request, not twenty
            text = join_modules(START).encode() if whole else asset.read_bytes()
            reply = Response(text, media_type=KINDS[asset.suffix])
        else:
            reply = send_error(404, "there is nothing at this path.")
        await reply(scope, receive, send)

    return Guard(app, token, name, port)


def answer_request(
    work: Callable[[QueryParams], Response], asked: QueryParams
) -> Response:
    """Return the response to a request, or an error response."""
    try:
        return work(asked)
    except MissingError as error:
        return send_error(404, str(error))
    except UnfinishedError as error:
        return send_error(503, str(error))
    except RegardError as error:
        return send_error(400, str(error))
    except CancelledError:
        return send_error(503, "the server is being closed.")
    except Exception as error:
        LOG.exception("the map could not answer")
        return send_error(500, f"{type(error).__name__}: {error}")


def read_once(asked: QueryParams) -> dict[str, str]:
    """Return the parameters by name; raise OptionError if one is repeated."""
    for name in asked:
        n = len(asked.getlist(name))
        if n > 1:
            shown = name if name.isprintable() else ascii(name)
            raise OptionError(f"{shown:.40} is given {n} times, expected once.")
    return dict(asked)


def send_json(data: Any, status: int = 200) -> Response:
    """Return data as ASCII JSON, which a lone surrogate cannot break."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return Response(text, status, media_type="application/json")


def send_error(status: int, sentence: str) -> Response:
    """Return an error message as JSON."""
    return send_json({"error": sentence}, status)


def send_sheet(sheet: Sheet) -> Response:
    """Return pixels, with their description in the headers."""
    headers = {
        f"X-{name.title()}": str(int(x) if isinstance(x, bool) else x)
        for name, x in sheet.describe().items()
    }
    kind = "application/octet-stream"
    return Response(sheet.to_bytes(), headers=headers, media_type=kind)


class Guard:
    """Pass on only requests that have the token and come from the page itself."""

    def __init__(self, app: ASGIApp, token: str, name: str, port: str) -> None:
        self.app, self.token, self.port = app, token.encode(), port
        self.place = f"{name}:{port}"
        self.hosts = {self.place, f"{HOST}:{port}", f"localhost:{port}"}
        self.open = name == socket.gethostname()  # listens on all addresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        if scope["type"] != "http":
            return
        wrong = self.judge(Request(scope))
        if wrong:
            await send_error(403, wrong)(scope, receive, send_more)
        elif scope["method"] != "GET":
            await send_error(405, "expected GET.")(scope, receive, send_more)
        else:
            await self.app(scope, receive, send_more)

    def knows(self, host: str) -> bool:
        """Return whether a Host is ours; on all addresses, any number is.

        DNS rebinding needs a name: nobody can make a browser send a number of ours.
        """
        if host in self.hosts:
            return True
        name, _, port = host.rpartition(":")
        return self.open and port == self.port and is_numeric_host(name)

    def judge(self, request: Request) -> str:
        """Return why a request is refused; empty if it is not."""
        headers, given = request.headers, request.query_params.getlist("token")
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or not self.knows(hosts[0]):
            return f"this server is {self.place}, and no other Host."
        if origins not in ([], [f"http://{hosts[0]}"]):
            return "only the page of this server may ask: another Origin."
        if not given:  # a browser adds cookies to requests from any site
            if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
                return "only the page of this server may ask: another site."
            given = [request.cookies.get(f"regard-{self.port}", "")]
        known = [secrets.compare_digest(x.encode(), self.token) for x in given]
        if not all(known):
            return "the token is missing or wrong. Open the URL that was printed."
        return ""


class Patient(H11Protocol):
    """A connection that is dropped if its client neither sends nor reads."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer; above the limit, drop the oldest idle connection."""
        super().connection_made(transport)
        self.since = self.loop.time()
        self.state: tuple[Any, int] = (None, 0)
        self.timer = self.loop.call_later(SECONDS, self.look)
        open_ones = [x for x in self.connections if not x.transport.is_closing()]
        idle = [x for x in open_ones if isinstance(x, Patient) and x.idle]
        if len(open_ones) > CLIENTS and idle:
            min(idle, key=lambda x: x.since).transport.abort()

    @property
    def idle(self) -> bool:
        """Whether no response is being computed or sent."""
        return self.cycle is None or self.cycle.response_complete

    def look(self) -> None:
        """Drop a client that has been inactive since the last check."""
        unread = self.transport.get_write_buffer_size()
        state = (self.cycle, unread)
        if state == self.state and (self.idle or unread):
            self.transport.abort()
        self.state = state
        self.timer = self.loop.call_later(SECONDS, self.look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self.timer.cancel()
        super().connection_lost(exc)


class Bars:
    """A progress bar for each running job."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.lock = progress, threading.Lock()
        self.tasks: dict[str, TaskID] = {}

    def report(self, what: str, done: int, whole: int) -> None:
        """Update the bar of a job; remove it when the job is done."""
        with self.lock:
            if what not in self.tasks:
                self.tasks[what] = self.progress.add_task(what, total=whole)
            self.progress.update(self.tasks[what], completed=done)
            if done >= whole:
                self.progress.remove_task(self.tasks.pop(what))
