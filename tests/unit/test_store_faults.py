"""Downloads that fail in the middle leave nothing that is taken for an adapter, and later ones succeed."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub.constants
import pytest

from lora_core.errors import InvalidAdapterPath
from lora_core.store import AdapterStore
from tests.unit.loopback_hub import FILES, REPO, LoopbackHub, content_hash, running_hub

ROOT = Path(__file__).parents[2]
SECOND_SHARD = "adapter_model-00002-of-00002.safetensors"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with running_hub() as server:
        yield server


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's client waits between its attempts; here it need not."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def store_of(hub: LoopbackHub, cache: Path) -> AdapterStore:
    return AdapterStore(True, endpoint=hub.url, cache_dir=cache)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def partial_files(cache: Path) -> list[Path]:
    return list(cache.rglob("*.incomplete"))


def assert_left_nothing(cache: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert partial_files(cache) == []
    assert not list(cache.rglob("adapter_config.json"))
    with monkeypatch.context() as offline:
        offline.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(InvalidAdapterPath, match="HF_HUB_OFFLINE is set"):
            AdapterStore(True, cache_dir=cache).resolve(source)


def fetching_process(hub: LoopbackHub, cache: Path, before: str = "pass") -> subprocess.Popen[str]:
    """Another process that fetches `REPO`."""
    code = (
        f"{before}\nfrom pathlib import Path\nfrom lora_core.store import AdapterStore\n"
        f"print(AdapterStore(True, endpoint={hub.url!r}, cache_dir=Path({str(cache)!r})).resolve({REPO!r}))"
    )
    environment = {"PATH": "", "HOME": str(cache.parent)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def wait_for_partial_file(cache: Path) -> Path:
    deadline = time.monotonic() + 30
    while not (found := partial_files(cache)):
        assert time.monotonic() < deadline, "no download began"
        time.sleep(0.01)
    return found[0]


@pytest.mark.usefixtures("no_pauses")
def test_connection_cut_inside_the_weights(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.cut.add("adapter_model.safetensors")
    store = store_of(hub, tmp_path)
    with pytest.raises(InvalidAdapterPath, match="cannot be fetched: the Hub was not reached, or broke off"):
        store.resolve(REPO)
    assert len(hub.downloads) > 1, "the Hub's client tries again"
    assert_left_nothing(tmp_path, REPO, monkeypatch)
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".safetensors"]
    hub.cut.clear()
    assert "adapter_model.safetensors" in contents(store.resolve(REPO))


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("status", [404, 403, 500, 503])
def test_second_shard_fails(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    hub.missing[SECOND_SHARD] = status
    store = store_of(hub, tmp_path)
    with pytest.raises(InvalidAdapterPath, match=f"cannot be fetched: .*{status}"):
        store.resolve(f"{REPO}@sharded")
    assert_left_nothing(tmp_path, f"{REPO}@sharded", monkeypatch)
    hub.missing.clear()
    hub.downloads.clear()
    assert contents(store.resolve(f"{REPO}@sharded")) == FILES["sharded"]
    assert sorted(hub.downloads) == ["sharded/adapter_config.json", f"sharded/{SECOND_SHARD}"]


@pytest.mark.usefixtures("no_pauses")
def test_a_failed_update_keeps_the_old_commit(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(hub, tmp_path)
    old = store.resolve(REPO)
    hub.files["main"]["adapter_model.safetensors"] = b"newer weights"
    hub.missing["adapter_model.safetensors"] = 404
    with pytest.raises(InvalidAdapterPath, match="the Hub lists a file that it does not have"):
        store.resolve(REPO)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert store.resolve(REPO) == old


def test_disk_full(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files["main"]["adapter_model.safetensors"] = bytes(100_000)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))"
    _, stderr = fetching_process(hub, tmp_path / "cache", limit).communicate(timeout=60)
    assert "cannot be written: File too large; HF_HOME moves it" in stderr
    assert_left_nothing(tmp_path / "cache", REPO, monkeypatch)
    store_of(hub, tmp_path / "cache").resolve(REPO)


def test_a_cache_that_may_not_be_written(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidAdapterPath, match="cannot be written: Not a directory"):
        store_of(hub, tmp_path / "file").resolve(REPO)


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("question", ["api", "HEAD", "GET"])
def test_a_silent_hub_is_given_up(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    hub.silent.add(question)
    began = time.monotonic()
    with pytest.raises(InvalidAdapterPath, match=r"the Hub was not reached, or broke off \(ReadTimeout"):
        store_of(hub, tmp_path).resolve(REPO)
    assert time.monotonic() - began < 10
    assert_left_nothing(tmp_path, REPO, monkeypatch)
    hub.silent.clear()
    store_of(hub, tmp_path).resolve(REPO)


def test_killed_in_the_middle(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    hub.open.clear()
    process = fetching_process(hub, cache)
    wait_for_partial_file(cache)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hub.open.set()
    assert partial_files(cache), "a killed process cannot tidy up"
    with monkeypatch.context() as offline:
        offline.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(InvalidAdapterPath, match=r"lacks its adapter_config\.json"):
            store_of(hub, cache).resolve(REPO)
    assert_left_nothing(cache, REPO, monkeypatch)
    assert "adapter_model.safetensors" in contents(store_of(hub, cache).resolve(REPO))


def test_another_process_downloads_it_at_the_moment(hub: LoopbackHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    hub.open.clear()
    process = fetching_process(hub, cache)
    theirs = wait_for_partial_file(cache)
    with ThreadPoolExecutor(1) as pool:
        ours = pool.submit(store_of(hub, cache).resolve, REPO)
        time.sleep(0.3)
        assert theirs.exists()
        assert not ours.done()
        hub.open.set()
        folder = ours.result(timeout=30)
    stdout, stderr = process.communicate(timeout=30)
    assert Path(stdout.strip()) == folder, stderr
    assert sorted(hub.downloads) == ["main/adapter_config.json", "main/adapter_model.safetensors"]
    assert partial_files(cache) == []


def test_a_partial_file_in_use_is_kept_even_where_locks_do_nothing(hub: LoopbackHub, tmp_path: Path) -> None:
    store = store_of(hub, tmp_path)
    blobs = store.resolve(REPO).parents[1] / "blobs"
    etag = content_hash(b"x")
    dead, used = blobs / f"{etag}.0123abcd.incomplete", blobs / f"{etag}.4567cdef.incomplete"
    resumable = blobs / f"{etag}.incomplete"  # older clients go on with these
    dead.touch()
    resumable.touch()
    with used.open("wb"):
        store.resolve(REPO)
        assert (dead.exists(), used.exists(), resumable.exists()) == (False, True, True)
    store.resolve(REPO)
    assert not used.exists()


def test_several_threads_download_once(hub: LoopbackHub, tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def resolve() -> Path:
        barrier.wait()
        return store_of(hub, tmp_path).resolve(REPO)

    with ThreadPoolExecutor(8) as pool:
        folders = {future.result() for future in [pool.submit(resolve) for _ in range(8)]}
    assert len(folders) == 1
    assert sorted(hub.downloads) == ["main/adapter_config.json", "main/adapter_model.safetensors"]
