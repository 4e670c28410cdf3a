"""The page is served to this machine alone, and nothing else is served."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from altgrad.config import UserError
from altgrad.watch.__main__ import HOST, PAGES, Server, main
from altgrad.watch.events import Events
from tests.watch.conftest import PROJECT, Play, started


@pytest.fixture(scope="module")  # none of what is asked changes anything
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("server")
    game = Play(root / "project", root / "whole", formats=["bf16"], seeds=(0,), steps=60, blocks=1)
    game.finish(game.keys[0])
    with Server(Events(game.root), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def answer(server: Server, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    response.body = response.read()
    connection.close()
    return response


def test_it_listens_on_the_loopback_interface_alone(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"
    own = [found[4][0] for found in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    for address in set(own) - {"127.0.0.1", "127.0.1.1"}:
        with pytest.raises(OSError):
            socket.create_connection((address, server.server_port), timeout=2).close()


def test_the_page_and_its_parts_are_served_and_may_load_nothing_from_elsewhere(server):
    for path in PAGES:
        found = answer(server, path)
        assert found.status == 200 and len(found.body) > 500
        policy = found.getheader("Content-Security-Policy")
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert found.getheader("X-Content-Type-Options") == "nosniff"
        assert not re.search(rb"https?://", found.body), "it names no other address"
    zipped = answer(server, "/watch.js", **{"Accept-Encoding": "gzip"})
    assert zipped.getheader("Content-Encoding") == "gzip"
    assert gzip.decompress(zipped.body) == answer(server, "/watch.js").body


def test_no_other_address_is_answered_and_nothing_can_be_changed(server):
    for path in ("/params.yaml", "/../params.yaml", "/..%2fparams.yaml", "//etc/passwd", "/events/../params.yaml"):
        assert answer(server, path).status == 404, path
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert answer(server, "/events", method).status == 501, method


def test_a_page_from_elsewhere_that_gives_its_own_name_to_this_address_gets_nothing(server):
    port = server.server_port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost", f"[::1]:{port}"):
        assert answer(server, "/events", Host=host).status == 403
    assert answer(server, "/events", Host=f"localhost:{port}").status == 200


def test_whatever_is_asked_for_the_events_begin_at_the_beginning(server):
    for query in ("", "?after=-1", "?after=x", "?after=999999999", "?list=%00&after=1", "?after=٣"):
        found = json.loads(answer(server, f"/events{urllib.parse.quote(query, safe='?=&%')}").body)
        assert found["events"][0][0] == "grid", query


def test_without_a_grid_the_page_is_told_what_to_do(tmp_path):
    with Server(Events(tmp_path), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = json.loads(answer(server, "/events").body)
        server.shutdown()
    assert "make repro" in found["problem"]


@pytest.fixture
def folder(play) -> Path:
    game = play(seeds=(0,))
    (game.root / "params.yaml").write_bytes((PROJECT / "params.yaml").read_bytes())
    return game.root


def test_the_command_says_where_the_page_is_and_ends_quietly(folder):
    with started(folder, "--port", "0") as url:
        assert urllib.request.urlopen(url, timeout=10).status == 200


def test_a_port_that_is_taken_is_one_sentence(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(UserError, match=f"{port} is in use; another, or 0 for a free one, will do"):
            main(["--port", port])
