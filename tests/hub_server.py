"""A hub on the loopback device: as much of the real one's HTTP interface as downloads touch, and ways to fail."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Fault:
    """One way to misbehave.

    Attributes:
        on: which requests: HEAD or GET of a file, API, or ANY.
        times: how often; -1 always.
        status: answer with this in place of the file.
        headers: sent with whatever is answered.
        body: answer 200 with this in place of the file.
        cut_after: close the connection after so many bytes.
        stall_after: send so many bytes, then nothing, until the server ends.
        length: the Content-Length to claim.
        location: redirect to the same path below this address.
        skip: let so many requests pass first.
    """

    on: str = "GET"
    times: int = -1
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    cut_after: int | None = None
    stall_after: int | None = None
    length: int | None = None
    location: str = ""
    skip: int = 0

    def applies(self, kind: str) -> bool:
        """Whether it is this request's turn; counts."""
        if self.on not in (kind, "ANY") or not self.times:
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


@dataclass
class Hub:
    """What the server offers, how it misbehaves, and what it was asked."""

    files: dict[str, bytes]
    url: str = ""
    status: int = 200
    html: bool = False
    etag: str | None = ""
    cut_after: int = 0
    num_cuts: int = 1
    ignore_range: bool = False
    hang: threading.Event | None = None
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    revisions: tuple[str, ...] = ("main", COMMIT)
    ended: threading.Event = field(default_factory=threading.Event)

    def gets(self) -> list[dict[str, str]]:
        return [headers for method, path, headers in self.requests if method == "GET" and "/resolve/" in path]

    def asked(self) -> list[str]:
        """Method and path of every request."""
        return [f"{method} {path}" for method, path, _ in self.requests]


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
        path = unquote(urlsplit(self.path).path)
        kind = "API" if path.startswith("/api/") else self.command
        self.fault = next((fault for fault in self.hub.faults if fault.applies(kind)), Fault())
        if self.fault.location:
            self.reply(302, {"Location": f"{self.fault.location}{self.path}"}, b"", with_body)
        elif self.fault.status:
            self.reply(self.fault.status, {}, b"no\n", with_body)
        elif self.fault.body is not None:
            kind = "text/html" if self.fault.body.startswith(b"<") else "application/octet-stream"
            self.reply(200, {"Content-Type": kind}, self.fault.body, with_body)
        elif kind == "API":
            self.send_listing(path.removeprefix("/api/models/"))
        else:
            self.send_path(path, with_body)

    def send_listing(self, path: str) -> None:
        repo, _, revision = path.partition("/revision/")
        names = [name for name in self.hub.files if name.startswith(f"{repo}/")]
        if not names:
            self.reply(404, {"X-Error-Code": "RepoNotFound"}, b"{}")
        elif revision and revision not in self.hub.revisions:
            self.reply(404, {"X-Error-Code": "RevisionNotFound"}, b"{}")
        else:
            siblings = [self.sibling(name, name.removeprefix(f"{repo}/")) for name in names]
            document = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []}
            self.reply(200, {"Content-Type": "application/json"}, json.dumps(document).encode())

    def sibling(self, key: str, name: str) -> dict[str, object]:
        content = self.hub.files[key]
        if name.endswith((".md", ".json")):
            return {"rfilename": name, "size": len(content), "blobId": "0"}
        sha256 = self.hub.etag or hashlib.sha256(content).hexdigest()
        lfs = {"sha256": sha256, "size": len(content), "pointerSize": 134}
        return {"rfilename": name, "size": len(content), "blobId": "0", "lfs": lfs}

    def send_path(self, path: str, with_body: bool) -> None:
        repo, _, rest = path.lstrip("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        content = self.hub.files.get(f"{repo}/{file}" if rest else path.lstrip("/"))
        if rest and revision not in self.hub.revisions:
            self.reply(404, {"X-Error-Code": "RevisionNotFound"}, b"no\n", with_body)
        elif self.hub.status != 200:
            self.reply(self.hub.status, {}, b"no\n", with_body)
        elif content is None:
            known = any(name.startswith(f"{repo}/") for name in self.hub.files)
            self.reply(404, {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound"}, b"no\n", with_body)
        elif self.hub.html:
            self.reply(200, {"Content-Type": "text/html"}, b"<html>please log in</html>", with_body)
        else:
            self.send_file(content, with_body, is_hub=bool(rest))

    def send_file(self, content: bytes, with_body: bool, *, is_hub: bool) -> None:
        etag = hashlib.sha256(content).hexdigest() if self.hub.etag == "" else self.hub.etag
        headers = {"Accept-Ranges": "bytes"}
        if etag:
            headers["ETag"] = f'"{etag}"'
        if is_hub:
            headers |= {
                "X-Linked-Etag": f'"{etag}"',
                "X-Linked-Size": str(len(content)),
                "X-Repo-Commit": COMMIT,
            }
        start, wanted = 0, self.headers.get("Range", "")
        changed = self.headers.get("If-Range") not in (None, f'"{etag}"')
        if wanted and not self.hub.ignore_range and not changed:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.reply(206 if start else 200, headers, content[start:], with_body)

    def reply(self, status: int, headers: dict[str, str], body: bytes, with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, **self.fault.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if self.fault.length is None else self.fault.length))
        self.end_headers()
        if not with_body:
            return
        cut_after = self.fault.cut_after
        if self.command == "GET" and self.hub.cut_after and self.hub.num_cuts and "/resolve/" in self.path:
            self.hub.num_cuts -= 1
            cut_after = self.hub.cut_after
        if self.fault.stall_after is not None:
            self.wfile.write(body[: self.fault.stall_after])
            self.wfile.flush()
            self.hub.ended.wait(30)
            cut_after = 0
            body = b""
        if cut_after is not None or self.fault.length is not None:
            self.close_connection = True
        self.wfile.write(body[:cut_after])


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that left is no news."""


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Hub]:
    """Serve these files (`OWNER/REPO/FILE` to content) until the block ends."""
    hub = Hub(files)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub, "fault": Fault()}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.ended.set()
        if hub.hang is not None:
            hub.hang.set()
        server.shutdown()
        server.server_close()
        thread.join()
