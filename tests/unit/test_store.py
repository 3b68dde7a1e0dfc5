"""Finding an adapter's folder: here, on a Hub (a loopback server speaking its API), or nowhere."""

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

import lora_core.hub
from lora_core.errors import InvalidAdapterPath
from lora_core.store import AdapterStore
from tests.unit.loopback_hub import FILES, REPO, LoopbackHub, running_hub

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with running_hub() as server:
        yield server


def store_of(hub: LoopbackHub, tmp_path: Path) -> AdapterStore:
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


def test_home_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = (tmp_path / "adapter").resolve()
    folder.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert AdapterStore(False).resolve("~/adapter") == folder
    (tmp_path / "link").symlink_to(folder)
    assert AdapterStore(False).resolve(str(tmp_path / "link")) == folder


def test_a_broken_link_says_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/no/such/folder")
    with pytest.raises(InvalidAdapterPath, match="is a link to '/no/such/folder', which does not exist"):
        AdapterStore(True).resolve(str(tmp_path / "link"))
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(InvalidAdapterPath, match="cannot be looked at: Too many levels of symbolic links"):
        AdapterStore(True).resolve(str(tmp_path / "a"))


@pytest.mark.parametrize(
    ("path", "mode", "reason"), [("", 0o300, "may not be read"), ("inner", 0o600, "looked at: Permission denied")]
)
def test_a_folder_that_may_not_be_read(path: str, mode: int, reason: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "inner").mkdir()
        os.chmod(folder, mode)
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(folder, 65534, 65534)
            os.seteuid(65534)
        try:
            with pytest.raises(InvalidAdapterPath, match=reason):
                AdapterStore(False).resolve(str(Path(folder, path)))
        finally:
            if is_root:
                os.seteuid(0)
            os.chmod(folder, 0o700)


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
    with pytest.raises(InvalidAdapterPath) as error:
        AdapterStore(True, endpoint="http://127.0.0.1:9", cache_dir=tmp_path).resolve(source)
    assert len(str(error.value)) < 400


def test_a_file_is_no_adapter(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    path.touch()
    with pytest.raises(InvalidAdapterPath, match="is a file; expected the folder"):
        AdapterStore(True).resolve(str(path))


def test_remote_sources_are_refused_unless_allowed(hub: LoopbackHub) -> None:
    with pytest.raises(InvalidAdapterPath, match=r"set lora_config.allow_remote: true"):
        AdapterStore(False, endpoint=hub.url).resolve(REPO)
    assert hub.tokens == []


def test_only_config_and_weights_are_fetched(hub: LoopbackHub, tmp_path: Path) -> None:
    folder = store_of(hub, tmp_path).resolve(REPO)
    names = ("adapter_config.json", "adapter_model.safetensors")
    assert contents(folder) == {name: FILES["main"][name] for name in names}
    assert sorted(hub.downloads) == [f"main/{name}" for name in names]
    assert store_of(hub, tmp_path).resolve(REPO) == folder
    assert len(hub.downloads) == 2  # the second time, all of it was in the cache


def test_shards_and_index_are_fetched(hub: LoopbackHub, tmp_path: Path) -> None:
    assert contents(store_of(hub, tmp_path).resolve(f"{REPO}@sharded")) == FILES["sharded"]


def test_weights_of_another_name_are_fetched(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.files["main"] = {"adapter_config.json": b"{}", "mine.safetensors": b"weights", "b/c.safetensors": b""}
    assert contents(store_of(hub, tmp_path).resolve(REPO)).keys() == {"adapter_config.json", "mine.safetensors"}


@pytest.mark.parametrize("revision", ["v1", "refs/pr/1"])
def test_revision(hub: LoopbackHub, tmp_path: Path, revision: str) -> None:
    assert contents(store_of(hub, tmp_path).resolve(f"{REPO}@{revision}")) == FILES[revision]


def test_a_cached_commit_is_not_asked_for(hub: LoopbackHub, tmp_path: Path) -> None:
    source = f"{REPO}@{hub.commit('v1')}"
    folder = store_of(hub, tmp_path).resolve(source)
    assert contents(folder) == FILES["v1"]
    hub.tokens.clear()
    assert store_of(hub, tmp_path).resolve(source) == folder
    assert hub.tokens == []


@pytest.mark.parametrize("revision", ["../../x", "/x", "x/", "a b", "-x", "a..b", "x~1"])
def test_a_revision_that_git_would_not_have(hub: LoopbackHub, tmp_path: Path, revision: str) -> None:
    with pytest.raises(InvalidAdapterPath, match="is no name of a branch, a tag or a commit"):
        store_of(hub, tmp_path).resolve(f"{REPO}@{revision}")
    assert hub.tokens == []


def test_a_branch_is_followed(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(hub, tmp_path)
    old = store.resolve(REPO)
    hub.files["main"] = {**FILES["main"], "adapter_model.safetensors": b"newer weights"}
    new = store.resolve(REPO)
    assert contents(new)["adapter_model.safetensors"] == b"newer weights"
    assert contents(old)["adapter_model.safetensors"] == b"new weights"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert store.resolve(REPO) == new


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("org/other", "the Hub has no such repo"),
        (f"{REPO}@v9", "the repo has no revision 'v9'"),
        (f"{REPO}@no-config", "the repo has no adapter_config.json, so it is not a PEFT adapter"),
    ],
)
def test_what_the_hub_does_not_have(hub: LoopbackHub, tmp_path: Path, source: str, reason: str) -> None:
    with pytest.raises(InvalidAdapterPath, match=rf"'{source}' cannot be fetched: {reason}"):
        store_of(hub, tmp_path).resolve(source)
    assert hub.downloads == []


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["adapter_model.bin"], "found adapter_model.bin and no adapter_model.safetensors: pickled weights are nev"),
        ([], "the repo has no weights to serve: no adapter_model.safetensors: the adapter's weights are missing$"),
        (["x/adapter_model.safetensors"], "x/adapter_model.safetensors is in a sub-folder"),
        (["a.safetensors", "b.safetensors"], "found a.safetensors, b.safetensors without adapter_model.safetensors.i"),
        (["adapter_model-00001-of-00002.safetensors"], "without adapter_model.safetensors.index.json"),
    ],
)
def test_a_repo_without_weights_that_are_served(
    hub: LoopbackHub, tmp_path: Path, names: list[str], reason: str
) -> None:
    hub.files["main"] = {"adapter_config.json": b"{}", **dict.fromkeys(names, b"weights")}
    with pytest.raises(InvalidAdapterPath, match=reason):
        store_of(hub, tmp_path).resolve(REPO)
    assert hub.downloads == []


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (b"{", "index.json: not a safetensors index"),
        (b"[]", "index.json: not a safetensors index"),
        (b'{"weight_map": {"x": "../y.safetensors"}}', "names '../y.safetensors', expected a .* in the same folder"),
        (b'{"weight_map": {"x": "y.safetensors"}}', "names y.safetensors, which the repo does not have"),
    ],
)
def test_a_wrong_index(hub: LoopbackHub, tmp_path: Path, index: bytes, reason: str) -> None:
    hub.files["sharded"]["adapter_model.safetensors.index.json"] = index
    with pytest.raises(InvalidAdapterPath, match=reason):
        store_of(hub, tmp_path).resolve(f"{REPO}@sharded")
    assert hub.downloads == ["sharded/adapter_model.safetensors.index.json"]


def test_absurd_sizes(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = AdapterStore(True, endpoint=hub.url, cache_dir=tmp_path, max_bytes=10)
    with pytest.raises(InvalidAdapterPath, match=r"its weights take 19 bytes, at most 10 .*max_download_bytes"):
        small.resolve(REPO)
    monkeypatch.setattr(lora_core.hub, "MAX_JSON_BYTES", 5)
    with pytest.raises(InvalidAdapterPath, match=r"its adapter_config.json take 8 bytes, at most 5"):
        store_of(hub, tmp_path).resolve(REPO)
    assert "main/adapter_config.json" not in hub.downloads


def test_gated_repo(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.gated = True
    with pytest.raises(InvalidAdapterPath, match="set HF_TOKEN"):
        store_of(hub, tmp_path).resolve(REPO)


def test_token_of_the_environment_or_the_login(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="lora_core")
    (tmp_path / "token").write_text("hf_stored")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    store_of(hub, tmp_path).resolve(REPO)
    assert set(hub.tokens) == {"Bearer hf_stored"}
    monkeypatch.setenv("HF_TOKEN", "hf_set")
    store_of(hub, tmp_path).resolve(f"{REPO}@v1")
    assert hub.tokens[-1] == "Bearer hf_set"
    assert "hf_s" not in caplog.text


def test_progress_is_logged_where_there_is_no_terminal(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lora_core.hub")
    monkeypatch.setattr(lora_core.hub, "PROGRESS_S", 0.0)
    hub.files["main"]["adapter_model.safetensors"] = bytes(12_000_000)
    store_of(hub, tmp_path).resolve(REPO)
    first, *bars, last = caplog.messages
    assert first == f"Fetching LoRA adapter {REPO} at commit {hub.commit('main')} from {hub.url}"
    assert last.startswith(f"Fetched LoRA adapter {REPO} in ")
    assert any(line.endswith(": 12.0 of 12.0 MB") for line in bars), bars


def test_unreachable_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the Hub's client waits longer between its attempts
    store = AdapterStore(True, endpoint="http://127.0.0.1:9", cache_dir=tmp_path)
    with pytest.raises(InvalidAdapterPath, match="cannot be fetched: the Hub was not reached"):
        store.resolve(REPO)


def test_a_cached_adapter_outlives_an_outage_but_not_a_refusal(
    hub: LoopbackHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_of(hub, tmp_path)
    folder = store.resolve(REPO)
    hub.down = True
    assert store.resolve(REPO) == folder
    assert "Using the cached org/adapter: the Hub answered with an error: Server error '503" in caplog.text
    unreachable = AdapterStore(True, endpoint="http://127.0.0.1:9", cache_dir=tmp_path / "cache")
    assert unreachable.resolve(REPO) == folder
    hub.down, hub.gated = False, True
    with pytest.raises(InvalidAdapterPath, match="access to the repo is restricted"):
        store.resolve(REPO)


def test_offline_mode_serves_the_cache_and_asks_nobody(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(hub, tmp_path)
    folder = store.resolve(REPO)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.tokens.clear()
    assert store.resolve(REPO) == folder
    assert store.resolve(f"{REPO}@{hub.commit('main')}") == folder
    with pytest.raises(InvalidAdapterPath, match=r"HF_HUB_OFFLINE is set, .* lacks its adapter_config.json"):
        store.resolve(f"{REPO}@v1")
    assert hub.tokens == []


@pytest.mark.parametrize(
    ("removed", "lacking"),
    [
        (["adapter_model-00002-of-00002.safetensors"], "its adapter_model-00002-of-00002.safetensors"),
        (["adapter_model.safetensors.index.json"], "its adapter_model.safetensors.index.json"),
        ([name for name in FILES["sharded"] if name != "adapter_config.json"], "its weights"),
    ],
)
def test_offline_mode_refuses_what_another_tool_left_incomplete(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: list[str], lacking: str
) -> None:
    store = store_of(hub, tmp_path)
    folder = store.resolve(f"{REPO}@sharded")
    for name in removed:
        (folder / name).unlink()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidAdapterPath, match=f"lacks {lacking}; unset HF_HUB_OFFLINE"):
        store.resolve(f"{REPO}@sharded")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert contents(store.resolve(f"{REPO}@sharded")) == FILES["sharded"]


def test_the_environment_names_hub_home_and_mode(hub: LoopbackHub, tmp_path: Path) -> None:
    code = f"from lora_core.store import AdapterStore; print(AdapterStore(True).resolve({REPO!r}))"
    environment = {"PATH": "", "HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, cwd=ROOT, env={**environment, **more}, capture_output=True, text=True)

    expected = "InvalidAdapterPath: 'org/adapter' cannot be fetched: the Hub was not reached"
    assert expected in run(HF_HUB_OFFLINE="1").stderr
    assert hub.tokens == []
    folder = Path(run().stdout.strip())
    assert folder.is_relative_to((tmp_path / "hf" / "hub").resolve())
    assert json.loads((folder / "adapter_config.json").read_bytes()) == {"r": 8}
