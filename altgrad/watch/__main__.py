"""Serve a page that follows the runs while they train: losses, the comparison so far, time left.

The server is for this machine alone. It answers four addresses (the page, its script, its style and the events) and
opens no file that a request names. It listens on the loopback interface, which keeps other machines out. It checks the
``Host`` header, since a foreign page can point its own name at this address (DNS rebinding). The page may load nothing
from elsewhere.
"""

import argparse
import errno
import gzip
import json
import signal
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from altgrad.common.console import called, handled
from altgrad.common.errors import UserError, run_stage
from altgrad.config import load_params
from altgrad.watch.events import Events

HOST, PORT = "127.0.0.1", 8765
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
    """Serves the page about ``events`` on ``port`` of the loopback interface; port 0 means any free port."""

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
            body = json.dumps(self._events(parse_qs(address.query)), separators=(",", ":")).encode()
            self._answer(200, body, "application/json")
        else:
            self._answer(404, b"there is no such page\n", "text/plain")

    def _events(self, query: dict[str, list[str]]) -> dict[str, Any]:
        count = query.get("after", ["0"])[-1]
        try:
            return self.server.events.after(query.get("list", [""])[-1], int(count) if count.isdecimal() else 0)
        except UserError as error:
            return {"problem": str(error)}

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        zipped = "gzip" in self.headers.get("Accept-Encoding", "") and len(body) > 1000
        body = gzip.compress(body, 5) if zipped else body
        self.send_response(status)
        content = {"Content-Type": kind, "Content-Length": str(len(body))}
        for name, value in (HEADERS | content | ({"Content-Encoding": "gzip"} if zipped else {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: a line a second would hide the other output of the terminal."""


@cache
def _part(name: str) -> bytes:
    return (files("altgrad.watch") / name).read_bytes()


def main(arguments: list[str]) -> None:
    """Serve the page until it is interrupted."""
    parser = argparse.ArgumentParser(prog=called("watch"), description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, default=PORT, help="0: any that is free; default: %(default)s")
    options = parser.parse_args(arguments)
    if not 0 <= options.port <= 65_535:
        raise UserError(f"--port: expected 0 to 65535, got {options.port}")
    try:
        price = load_params().budget.price if Path("params.yaml").exists() else 0.0  # else other programs train
        server = Server(Events(Path(), price), options.port)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "is in use" if error.errno == errno.EADDRINUSE else "needs privileges"
        raise UserError(f"--port: {options.port} {why}; another, or 0 for a free one, will do") from None
    print(f"The page: {server.url} (for this machine alone; Ctrl-C ends it, and no cell)", flush=True)
    # The handler makes Ctrl-C work even if the shell ignores it, as it does for a command in the background.
    with suppress(KeyboardInterrupt), handled(signal.default_int_handler), server:
        server.serve_forever()


if __name__ == "__main__":
    run_stage(main)
