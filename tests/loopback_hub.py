"""A server on this machine that speaks the protocol of the Hugging Face hub."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
API = re.compile(
    r"/api/models/(?P<repo>.+?)(?:/(?P<what>revision|tree)/(?P<at>[^/]+))?/?"
)
FILE = re.compile(r"/(?P<repo>.+?)/resolve/(?P<at>[^/]+)/(?P<file>.+)")
GATED = "owner/gated"


class Hub(BaseHTTPRequestHandler):
    """Answers for the repositories of its server: {name: {file: bytes}}."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        found = API.fullmatch(path) or FILE.fullmatch(path)
        files = self.server.repos.get(found["repo"]) if found else None
        if found and found["repo"] == GATED:
            self.answer(b"", code=403, error="GatedRepo")
        elif files is None:
            self.answer(b"", code=404, error="RepoNotFound")
        elif found["at"] not in (None, "main", COMMIT):
            self.answer(b"", code=404, error="RevisionNotFound")
        elif "file" in found.groupdict():
            self.answer(files[found["file"]])
        elif found["what"] == "tree":
            self.answer(json.dumps([describe(*x) for x in files.items()]).encode())
        else:
            names = [{"rfilename": name} for name in files]
            about = {"id": found["repo"], "sha": COMMIT, "siblings": names}
            self.answer(json.dumps(about).encode())

    def answer(self, body, *, code=200, error=""):
        self.send_response(code)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def describe(name, body):
    oid = hashlib.sha1(body).hexdigest()
    return {"type": "file", "path": name, "size": len(body), "oid": oid}


@contextmanager
def serve_hub(repos):
    """Yield a running server; `server.requests` are those so far."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.repos, server.requests = repos, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
