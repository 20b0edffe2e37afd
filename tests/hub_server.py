"""A hub on the loopback device: as much of the real one's HTTP interface as a file download touches."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the server offers, how it misbehaves, and what it was asked."""

    files: dict[str, bytes]
    url: str = ""
    status: int = 200
    html: bool = False
    etag: str = ""
    cut_after: int = 0
    num_cuts: int = 1
    ignore_range: bool = False
    hang: threading.Event | None = None
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def gets(self) -> list[dict[str, str]]:
        return [headers for method, path, headers in self.requests if method == "GET" and "/resolve/" in path]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        self.hub.requests.append(
            (self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
        )
        if self.hub.hang is not None:
            self.hub.hang.wait(30)
            self.close_connection = True
            return
        repo, _, rest = self.path.lstrip("/").partition("/resolve/")
        content = self.hub.files.get(f"{repo}/{rest.partition('/')[2]}")
        if self.hub.status != 200 or content is None:
            self.reply(self.hub.status if self.hub.status != 200 else 404, {}, b"no\n" if with_body else b"")
        elif self.hub.html:
            self.reply(200, {"Content-Type": "text/html"}, b"<html>please log in</html>" if with_body else b"")
        else:
            self.send_file(content, with_body)

    def send_file(self, content: bytes, with_body: bool) -> None:
        etag = self.hub.etag or hashlib.sha256(content).hexdigest()
        headers = {
            "ETag": f'"{etag}"',
            "X-Linked-Etag": f'"{etag}"',
            "X-Linked-Size": str(len(content)),
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        start, wanted = 0, self.headers.get("Range", "")
        if wanted and not self.hub.ignore_range:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.reply(206 if start else 200, headers, content[start:], with_body)

    def reply(self, status: int, headers: dict[str, str], body: bytes, with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not with_body:
            return
        if self.command == "GET" and self.hub.cut_after and self.hub.num_cuts:
            self.hub.num_cuts -= 1
            self.close_connection = True
            body = body[: self.hub.cut_after]
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that left is no news."""


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Hub]:
    """Serve these files (`OWNER/REPO/FILE` to content) until the block ends."""
    hub = Hub(files)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        if hub.hang is not None:
            hub.hang.set()
        server.shutdown()
        server.server_close()
        thread.join()
