"""The page over HTTP, for this machine alone.

Four addresses are answered and no file is looked up by name: the page, its script, its style, and the events. Listening
on the loopback interface keeps other machines out; the ``Host`` header is checked too, since a page from elsewhere can
point its own name at this address (DNS rebinding). The page may load nothing from anywhere else.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from altgrad.common.errors import UserError
from altgrad.watch.events import Events

HOST = "127.0.0.1"
PAGES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
    "/watch.css": ("watch.css", "text/css; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Server(ThreadingHTTPServer):
    """Serves the page about ``events`` on ``port`` of the loopback interface, a free one if that is 0."""

    daemon_threads = True

    def __init__(self, events: Events, port: int) -> None:
        super().__init__((HOST, port), Handler)
        self.events = events

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "altgrad", ""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        port = self.server.server_port
        if self.headers.get("Host", "") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._answer(403, b"this page is for 127.0.0.1 and localhost\n", "text/plain")
        elif address.path in PAGES:
            name, kind = PAGES[address.path]
            self._answer(200, _part(name), kind)
        elif address.path == "/events":
            self._events(parse_qs(address.query))
        else:
            self._answer(404, b"there is no such page\n", "text/plain")

    def _events(self, query: dict[str, list[str]]) -> None:
        count = query.get("after", ["0"])[-1]
        try:
            found: Any = self.server.events.after(query.get("list", [""])[-1], int(count) if count.isdecimal() else 0)
        except UserError as error:
            found = {"problem": str(error)}
        body = json.dumps(found, separators=(",", ":")).encode()
        self._answer(200, body, "application/json")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        zipped = "gzip" in self.headers.get("Accept-Encoding", "") and len(body) > 1000
        body = gzip.compress(body, 5) if zipped else body
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        if zipped:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a line a second would hide what else the terminal shows."""


@cache
def _part(name: str) -> bytes:
    return (files("altgrad.watch") / name).read_bytes()
