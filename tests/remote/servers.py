"""Servers on this machine for the tests of remote files: a real nginx, and one that misbehaves on
demand."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

NGINX = shutil.which("nginx") or shutil.which(
    "nginx", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin"
)

_CONFIG = """
{user} daemon off; worker_processes 1; pid {state}/pid; error_log {state}/error.log;
events {{ worker_connections 64; }}
http {{
  log_format short '$status $body_bytes_sent $request_method $request_uri'; access_log {state}/access.log short;
  client_body_temp_path {state}/body; proxy_temp_path {state}/proxy; fastcgi_temp_path {state}/fastcgi;
  uwsgi_temp_path {state}/uwsgi; scgi_temp_path {state}/scgi;
  server {{
    listen 127.0.0.1:{port}; root {files};
    location /whole/ {{ alias {files}/; max_ranges 0; }}
    location /secret/ {{ alias {files}/; auth_basic on; auth_basic_user_file {state}/users; }}
    location /forbidden/ {{ return 403; }}
    location /page/ {{ default_type text/html; return 200 "<!DOCTYPE html><html>sign in</html>"; }}
  }}
}}
"""


class Answer(NamedTuple):
    """The log of a request on the server."""

    status: int
    nbytes: int  # of the body
    method: str
    path: str


class Nginx:
    """A running nginx that serves the folder `files` at `url`."""

    def __init__(self, files: Path, state: Path, port: int) -> None:
        self.files = files
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self._log = state / "access.log"
        self._seen = 0
        self._marks = 0

    def answers(self) -> list[Answer]:
        """The requests since the last time. One of our own shows that those before it have been
        logged."""
        self._marks += 1
        mark = f"/mark-{self._marks}"
        with urllib.request.urlopen(f"{self.url}/page{mark}"):
            pass
        while mark not in (text := self._log.read_text()):
            time.sleep(0.01)
        lines = text.splitlines()
        new, self._seen = lines[self._seen : -1], len(lines)
        return [
            Answer(int(s), int(n), method, path)
            for s, n, method, path in (line.split(" ", 3) for line in new)
        ]


@contextmanager
def nginx(files: Path, state: Path) -> Iterator[Nginx]:
    """Serve `files`: at /, without ranges at /whole/, to user:pa55 alone at /secret/."""
    assert NGINX is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (state / "users").write_text("user:{PLAIN}pa55\n")
    config = state / "nginx.conf"
    user = (
        "user root;" if hasattr(os, "geteuid") and os.geteuid() == 0 else ""
    )  # who may read what the tests write
    config.write_text(_CONFIG.format(user=user, state=state, files=files, port=port))
    process = subprocess.Popen([NGINX, "-c", config, "-e", state / "error.log"])
    try:
        _wait(port, process, state)
        yield Nginx(files, state, port)
    finally:
        process.terminate()
        process.wait()


def _wait(port: int, process: subprocess.Popen[bytes], state: Path) -> None:
    for _ in range(500):
        assert process.poll() is None, (state / "error.log").read_text()
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.01)
    raise TimeoutError("nginx does not answer")


class Request(NamedTuple):
    """A request for bytes `start` to `stop`, the how manyth it is, from 0."""

    number: int
    start: int
    stop: int


class Misbehaving:
    """Serves ranges of `data`, each as `behave` says: a Reply differs from a good answer in what it
    names."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.etag = '"one"'
        self.behave: Callable[[Request], Reply] = lambda request: Reply()
        self.requests: list[Request] = []
        self.url = ""


class Reply(NamedTuple):
    """The faults of an answer."""

    status: int = 206
    cut: int | None = None  # bytes after which the connection is closed
    stall: int | None = None  # bytes after which nothing more comes, for as long as the test runs
    etag: str | None = None
    ranges: bool = True
    length: bool = True  # whether Content-Length is there
    body: bytes | None = None
    content_range: str | None = None
    raw: bytes | None = None  # sent instead of an answer
    retry_after: str | None = None
    location: str | None = None


@contextmanager
def misbehaving(data: bytes) -> Iterator[Misbehaving]:
    served = Misbehaving(data)
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
            assert found is not None
            request = Request(
                len(served.requests), int(found[1]), min(int(found[2]) + 1, len(served.data))
            )
            served.requests.append(request)
            self._answer(request, served.behave(request))

        def _answer(self, request: Request, reply: Reply) -> None:
            if reply.raw is not None:
                self.wfile.write(reply.raw)
                self.close_connection = True
                return
            body = served.data[request.start : request.stop] if reply.ranges else served.data
            body = body if reply.body is None else reply.body
            self.send_response(reply.status if reply.ranges else 200)
            self.send_header("ETag", reply.etag or served.etag)
            if reply.ranges:
                whole = f"bytes {request.start}-{request.stop - 1}/{len(served.data)}"
                self.send_header("Content-Range", reply.content_range or whole)
            if reply.retry_after is not None:
                self.send_header("Retry-After", reply.retry_after)
            if reply.location is not None:
                self.send_header("Location", reply.location)
            if reply.length:
                self.send_header("Content-Length", str(len(body)))
            else:
                self.send_header("Connection", "close")
            self.end_headers()
            if reply.stall is not None:
                self.wfile.write(body[: reply.stall])
                ended.wait()
            self.wfile.write(body[: len(body) if reply.cut is None else reply.cut])
            self.close_connection = reply.cut is not None or not reply.length

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:  # whoever asked has gone
                pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_address[1]}/run.pth"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield served
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
