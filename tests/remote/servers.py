"""Servers on this machine: a web server that misbehaves on demand, and an object store."""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

FILE = "run.pth"


class Request(NamedTuple):
    """A request for the bytes from `start` to `stop` of a file. `number` counts requests from 0."""

    number: int
    start: int
    stop: int
    path: str  # with the query
    user: str  # name and password


class Reply(NamedTuple):
    """The faults of a response."""

    status: int = 206
    cut: int | None = None  # number of bytes after which the server closes the connection
    stall: int | None = None  # number of bytes after which the server sends nothing
    drip: bool = False  # whether the server sends ten bytes a second, without end
    etag: str | None = None
    ranges: bool = True
    length: bool = True  # whether the response has the header Content-Length
    body: bytes | None = None
    content_range: str | None = None
    raw: bytes | None = None  # sent instead of a response
    retry_after: str | None = None
    location: str | None = None


class Misbehaving:
    """Serves the files of a folder. `behave` returns the faults of each response."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.behave: Callable[[Request], Reply] = lambda request: Reply()
        self.requests: list[Request] = []
        self.root = ""

    @property
    def url(self) -> str:
        """The URL of the only file."""
        return f"{self.root}/{FILE}"


@contextmanager
def misbehaving(data: bytes) -> Iterator[Misbehaving]:
    """Serve one file."""
    with TemporaryDirectory() as folder:
        Path(folder, FILE).write_bytes(data)
        with serving(Path(folder)) as served:
            yield served


@contextmanager
def serving(folder: Path) -> Iterator[Misbehaving]:
    """Serve a folder. A path may start with another folder, such as /secret, for `behave`."""
    served = Misbehaving(folder)
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
            assert found is not None
            path = self.path.partition("?")[0].lstrip("/")
            file = folder / path
            if not file.exists():
                file = folder / path.partition("/")[2]
            size = file.stat().st_size if file.is_file() else -1
            start, stop = int(found[1]), min(int(found[2]) + 1, size)
            user = base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic "))
            request = Request(len(served.requests), start, stop, self.path, user.decode())
            served.requests.append(request)
            reply = served.behave(request)
            if reply == Reply() and size < 0:
                reply = Reply(status=404)
            elif reply == Reply() and start >= stop:
                reply = Reply(status=416, content_range=f"bytes */{size}")
            self._answer(request, reply, file, size)

        def _answer(self, request: Request, reply: Reply, file: Path, size: int) -> None:
            if reply.raw is not None:
                self.wfile.write(reply.raw)
                self.close_connection = True
                return
            body = reply.body or b""
            if reply.body is None and size >= 0:
                start, stop = (request.start, request.stop) if reply.ranges else (0, size)
                with file.open("rb") as opened:
                    opened.seek(start)
                    body = opened.read(stop - start)
            self.send_response(reply.status if reply.ranges else 200)
            changed = file.stat().st_mtime_ns if size >= 0 else 0
            self.send_header("ETag", reply.etag or f'"{changed}"')
            if reply.ranges:
                whole = f"bytes {request.start}-{request.stop - 1}/{size}"
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
            while reply.drip and not ended.wait(0.1):
                self.wfile.write(b"P")
            self.wfile.write(body[: reply.cut])
            self.close_connection = reply.cut is not None or not reply.length

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(ConnectionError):  # the client closed the connection
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.root = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield served
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Run moto's S3 server, and yield the environment that leads to it."""
    s3fs, server = pytest.importorskip("s3fs"), pytest.importorskip("moto.server")
    running = server.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "s3cret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        running.stop()
