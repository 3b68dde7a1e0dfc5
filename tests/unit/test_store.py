"""Finding an adapter's folder: here, on a Hub (a loopback server speaking its API), or nowhere."""

import hashlib
import http.server
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest

from lora_core.errors import InvalidAdapterPath
from lora_core.store import AdapterStore

REPO = "org/adapter"
FILES = {
    "main": {
        "adapter_config.json": b'{"r": 8}',
        "adapter_model.safetensors": b"new weights",
        "adapter_model.bin": b"pickle",
        "README.md": b"words",
        "optimizer.pt": b"pickle",
        "checkpoint-10/adapter_model.safetensors": b"other weights",
        "checkpoint-10/adapter_config.json": b"{}",
    },
    "v1": {"adapter_config.json": b'{"r": 4}', "adapter_model.safetensors": b"old weights"},
    "no-config": {"model.safetensors": b"a whole model"},
}


class Hub(http.server.ThreadingHTTPServer):
    """The few endpoints of a Hub that fetching a repo needs, counting what is downloaded."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.downloads: list[str] = []
        self.gated = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


class HubHandler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None:
        """Say nothing on stderr."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).removeprefix("/")
        if self.server.gated:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif not path.removeprefix("api/models/").startswith(REPO + "/"):
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        else:
            self._answer_repo(path)

    def _answer_repo(self, path: str) -> None:
        kind, _, rest = path.removeprefix("api/models/").removeprefix(REPO + "/").partition("/")
        name, _, file = rest.partition("/")
        revision = next((known for known in FILES if name in (known, commit_of(known))), None)
        if revision is None:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        files = FILES[revision]
        if kind == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self._send_json({"id": REPO, "sha": commit_of(revision), "siblings": siblings})
        if kind == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            return self._send_json(entries)
        if file not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit_of(revision)})
        if self.command == "GET":
            self.server.downloads.append(f"{revision}/{file}")
        etag = f'"{hashlib.sha1(files[file]).hexdigest()}"'
        return self._send(200, files[file], {"X-Repo-Commit": commit_of(revision), "ETag": etag})

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def store_of(hub: Hub, tmp_path: Path) -> AdapterStore:
    return AdapterStore(True, endpoint=hub.url, cache_dir=tmp_path / "cache")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "adapter@v1").mkdir(parents=True)
    expected = (tmp_path / "org" / "adapter@v1").resolve()
    assert AdapterStore(False).resolve(str(expected)) == expected
    monkeypatch.chdir(tmp_path)
    assert AdapterStore(False).resolve("org/adapter@v1") == expected
    assert AdapterStore(True).resolve("org/adapter@v1") == expected  # a local folder comes first


@pytest.mark.parametrize(
    "source", ["/no/such/folder", "./org/adapter", "../adapter", "adapter", "a/b/c", "org/adapter@", "-org/x", "org/ü"]
)
@pytest.mark.parametrize("allow_remote", [True, False])
def test_missing_folder_is_named(source: str, allow_remote: bool) -> None:
    with pytest.raises(
        InvalidAdapterPath, match=r"does not exist; expected a folder with adapter_config.json"
    ) as error:
        AdapterStore(allow_remote).resolve(source)
    assert repr(source) in str(error.value)


@pytest.mark.parametrize("source", ["", "  ", "a\0b", "x" * 5000, "org/" + "x" * 5000, "org/a..b", "org/a--b"])
def test_malformed_source(source: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapterPath):
        AdapterStore(True, endpoint="http://127.0.0.1:9", cache_dir=tmp_path).resolve(source)


def test_a_file_is_no_adapter(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    path.touch()
    with pytest.raises(InvalidAdapterPath, match="is a file; expected the folder"):
        AdapterStore(True).resolve(str(path))


def test_remote_sources_are_refused_unless_allowed(hub: Hub) -> None:
    with pytest.raises(InvalidAdapterPath, match=r"set lora_config.allow_remote: true"):
        AdapterStore(False, endpoint=hub.url).resolve(REPO)
    assert hub.downloads == []


def test_only_config_and_weights_are_fetched(hub: Hub, tmp_path: Path) -> None:
    folder = store_of(hub, tmp_path).resolve(REPO)
    names = ("adapter_config.json", "adapter_model.safetensors")
    assert contents(folder) == {name: FILES["main"][name] for name in names}
    assert sorted(hub.downloads) == [f"main/{name}" for name in names]
    assert store_of(hub, tmp_path).resolve(REPO) == folder
    assert len(hub.downloads) == 2  # the second time, all of it was in the cache


@pytest.mark.parametrize("revision", ["v1", commit_of("v1")])
def test_revision(hub: Hub, tmp_path: Path, revision: str) -> None:
    assert contents(store_of(hub, tmp_path).resolve(f"{REPO}@{revision}")) == FILES["v1"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("org/other", "the Hub has no such repo"),
        (f"{REPO}@v9", "the repo has no revision 'v9'"),
        (f"{REPO}@no-config", "the repo has no adapter_config.json, so it is not a PEFT adapter"),
    ],
)
def test_what_the_hub_does_not_have(hub: Hub, tmp_path: Path, source: str, reason: str) -> None:
    with pytest.raises(InvalidAdapterPath, match=rf"'{source}' cannot be fetched: {reason}"):
        store_of(hub, tmp_path).resolve(source)
    assert hub.downloads == []


def test_gated_repo(hub: Hub, tmp_path: Path) -> None:
    hub.gated = True
    with pytest.raises(InvalidAdapterPath, match="set HF_TOKEN"):
        store_of(hub, tmp_path).resolve(REPO)


def test_unreachable_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the Hub's client waits longer between its attempts
    store = AdapterStore(True, endpoint="http://127.0.0.1:9", cache_dir=tmp_path)
    with pytest.raises(InvalidAdapterPath, match="cannot be fetched: the Hub was not reached"):
        store.resolve(REPO)


def test_offline_mode_serves_the_cache_and_asks_nobody(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(hub, tmp_path)
    folder = store.resolve(REPO)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.downloads.clear()
    assert store.resolve(REPO) == folder
    with pytest.raises(InvalidAdapterPath, match="HF_HUB_OFFLINE"):
        store.resolve(f"{REPO}@v1")
    assert hub.downloads == []


def test_offline_mode_is_read_from_the_environment(hub: Hub, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from lora_core.store import AdapterStore; "
        f"AdapterStore(True, endpoint={hub.url!r}, cache_dir=Path({str(tmp_path)!r})).resolve({REPO!r})"
    )
    environment = {"PATH": "", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert "InvalidAdapterPath: 'org/adapter' cannot be fetched: the Hub was not reached" in ended.stderr
    assert hub.downloads == []
