"""A Hub on the loopback device: the few endpoints that fetching a repo needs, and the faults a real one can have."""

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

REPO = "org/adapter"
FILES = {
    "main": {
        "adapter_config.json": b'{"r": 8}',
        "adapter_model.safetensors": b"new weights",
        "model.safetensors": b"a base model beside it",
        "adapter_model.bin": b"pickle",
        "README.md": b"words",
        "optimizer.pt": b"pickle",
        "checkpoint-10/adapter_model.safetensors": b"other weights",
        "checkpoint-10/adapter_config.json": b"{}",
    },
    "v1": {"adapter_config.json": b'{"r": 4}', "adapter_model.safetensors": b"old weights"},
    "refs/pr/1": {"adapter_config.json": b'{"r": 2}', "adapter_model.safetensors": b"proposed weights"},
    "no-config": {"model.safetensors": b"a whole model"},
    "sharded": {
        "adapter_config.json": b'{"r": 16}',
        "adapter_model-00001-of-00002.safetensors": b"first half",
        "adapter_model-00002-of-00002.safetensors": b"second half",
        "adapter_model.safetensors.index.json": json.dumps(
            {"weight_map": {key: f"adapter_model-0000{key}-of-00002.safetensors" for key in "12"}}
        ).encode(),
    },
}


def content_hash(content: bytes) -> str:
    """What the Hub calls a file by its content."""
    return hashlib.sha1(content).hexdigest()


class LoopbackHub(http.server.ThreadingHTTPServer):
    """One repo, `REPO`, with a commit for each content of each revision.

    Attributes:
        files: Content by name, by revision; may be changed.
        downloads: `revision/name` of each whole file that was asked for, in order.
        tokens: `Authorization` of each question, None where there was none.
        gated: Whether access is refused.
        down: Answer every question with 503.
        cut: Names of files whose connection is cut in the middle.
        missing: Status to answer with, by name of file, when it is downloaded.
        silent: Questions never answered: "api", or "HEAD" or "GET" for files.
        open: While clear, a download stops after its first half.
        stopped: Set when the Hub ends.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {revision: dict(files) for revision, files in FILES.items()}
        self.downloads: list[str] = []
        self.tokens: list[str | None] = []
        self.gated = self.down = False
        self.cut: set[str] = set()
        self.missing: dict[str, int] = {}
        self.silent: set[str] = set()
        self.open = threading.Event()
        self.open.set()
        self.stopped = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that went away; some tests kill them."""

    @property
    def url(self) -> str:
        """Address of the Hub."""
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, revision: str) -> str:
        """The commit a revision is at."""
        files = [(name, content_hash(content)) for name, content in sorted(self.files[revision].items())]
        return content_hash(repr((revision, files)).encode())


@contextmanager
def running_hub() -> Iterator[LoopbackHub]:
    """A Hub that answers until the end of the block."""
    server = LoopbackHub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.stopped.set()
        server.open.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: LoopbackHub

    def log_message(self, *args: object) -> None:
        """Say nothing on stderr."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.server.tokens.append(self.headers["Authorization"])
        path = unquote(urlsplit(self.path).path).removeprefix("/")
        if ("api" if path.startswith("api/") else self.command) in self.server.silent:
            self.server.stopped.wait()
        elif self.server.down:
            self._send(503, b"", {})
        elif self.server.gated:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif path.startswith(f"api/models/{REPO}/revision/"):
            self._answer_api(path.removeprefix(f"api/models/{REPO}/revision/"))
        elif path.startswith(f"{REPO}/resolve/"):
            self._answer_file(path.removeprefix(f"{REPO}/resolve/"))
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _revision(self, name: str) -> str | None:
        return next((known for known in self.server.files if name in (known, self.server.commit(known))), None)

    def _answer_api(self, name: str) -> None:
        revision = self._revision(name)
        if revision is None:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        siblings = [{"rfilename": name, "size": len(text)} for name, text in self.server.files[revision].items()]
        body = json.dumps({"id": REPO, "sha": self.server.commit(revision), "siblings": siblings})
        return self._send(200, body.encode(), {"Content-Type": "application/json"})

    def _answer_file(self, path: str) -> None:
        revision = next((known for known in self.server.files if path.startswith(f"{known}/")), None)
        if revision is None:
            revision = self._revision(path.partition("/")[0])
        if revision is None:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        name = path.removeprefix(f"{revision}/").removeprefix(f"{self.server.commit(revision)}/")
        headers = {"X-Repo-Commit": self.server.commit(revision)}
        content = self.server.files[revision].get(name)
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", **headers})
        if self.command == "GET":
            self.server.downloads.append(f"{revision}/{name}")
            if name in self.server.missing:
                status = self.server.missing[name]
                return self._send(status, b"", {"X-Error-Code": "EntryNotFound"} if status == 404 else {})
        return self._send(200, content, {"ETag": f'"{content_hash(content)}"', **headers}, name in self.server.cut)

    def _send(self, status: int, body: bytes, headers: dict[str, str], is_cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            half = len(body) // 2
            self.wfile.write(body[:half])
            self.wfile.flush()
            if "ETag" in headers:
                self.server.open.wait()
            if not is_cut:
                self.wfile.write(body[half:])
