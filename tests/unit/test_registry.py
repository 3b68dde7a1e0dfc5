"""The desired adapters and their journal."""

import logging
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import changes as changes_module
from cluster.changes import Change
from cluster.fingerprint import folder_fingerprint
from cluster.journal import session_journal
from cluster.names import staged_name
from cluster.registry import AdapterRegistry
from lora_core.errors import AdapterError, AdapterNameTaken, AdapterNotFound, ConfigError, LoRAFleetError
from lora_core.types import LoadReport, LoRAOperation


def loaded(registry: AdapterRegistry, name: str, path: str) -> int:
    """Load an adapter to the end; returns its generation."""
    change = registry.begin_load(name, path)
    assert change is not None
    return registry.commit_load(name, report(change.epoch, f"hash of {path}")).generation


def report(generation: int, content_hash: str) -> LoadReport:
    return LoadReport(generation=generation, content_hash=content_hash, num_modules=2, ranks={4: 2}, num_bytes=64)


def brief(changes: list[Change] | None) -> list[tuple[str, str, int | None]]:
    """What the changes do: operation, name, generation."""
    assert changes is not None
    return [(change.request.operation.value, change.request.lora_name, change.request.generation) for change in changes]


def test_a_load_is_listed_only_once_committed() -> None:
    registry = AdapterRegistry()
    change = registry.begin_load("a", "/a")
    assert change is not None
    assert (change.request.operation, change.request.lora_path) == (LoRAOperation.LOAD, "/a")
    assert change.request.generation == change.epoch == registry.epoch
    assert registry.ready() == {}
    entry = registry.commit_load("a")
    assert registry.ready() == {"a": entry}
    assert (entry.generation, entry.epoch, entry.static) == (change.epoch, change.epoch, False)


def test_when_an_adapter_was_loaded_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.9]
    monkeypatch.setattr("time.time", lambda: clock[0])
    journal = tmp_path / "journal"
    with closing(AdapterRegistry(journal, static={"s": "/s"})) as registry:
        clock[0] = 2000
        loaded(registry, "a", "/a")
        clock[0] = 3000
        assert (registry.entries["s"].created, registry.entries["a"].created) == (1000, 2000)
        assert registry.begin_replace("a", "/b") is not None
        registry.commit_replace("a", None)
        registry.finish_replace("a")
    with closing(AdapterRegistry(journal, static={"s": "/s"})) as registry:
        assert (registry.entries["s"].created, registry.entries["a"].created) == (1000, 3000)


def test_the_same_load_again_changes_nothing() -> None:
    registry = AdapterRegistry()
    loaded(registry, "a", "/a")
    before = registry.epoch
    assert registry.begin_load("a", "/a") is None
    assert registry.epoch == before


def test_the_same_load_with_other_files_is_refused() -> None:
    registry = AdapterRegistry()
    registry.begin_load("a", "/a", "files of then")
    assert registry.commit_load("a").fingerprint == "files of then"
    before = registry.epoch
    assert registry.begin_load("a", "/a", "files of then") is None
    assert registry.begin_load("a", "/a") is None, "no one knows"
    with pytest.raises(AdapterNameTaken, match=r"'a' is loaded from '/a', whose files have changed since; send"):
        registry.begin_load("a", "/a", "files of now")
    assert registry.epoch == before
    loaded(registry, "unknown", "/u")
    assert registry.begin_load("unknown", "/u", "files of now") is None


@pytest.mark.parametrize("state", ["loading", "ready", "unloading"])
def test_a_name_in_use_is_refused_for_other_weights(state: str) -> None:
    registry = AdapterRegistry()
    registry.begin_load("a", "/a")
    if state != "loading":
        registry.commit_load("a")
    if state == "unloading":
        registry.begin_unload("a")
    with pytest.raises(AdapterNameTaken, match=r"'a'.*'/a'.*'/b'"):
        registry.begin_load("a", "/b")


def test_an_unloading_adapter_is_unlisted_at_once_and_its_name_free_at_the_end() -> None:
    registry = AdapterRegistry()
    generation = loaded(registry, "a", "/a")
    change = registry.begin_unload("a")
    assert brief([change]) == [("unload", "a", generation)]
    assert registry.ready() == {}
    with pytest.raises(AdapterNotFound):
        registry.begin_unload("a")
    registry.finish_unload("a")
    assert loaded(registry, "a", "/b") > generation


def test_a_rollback_frees_the_name_at_once() -> None:
    registry = AdapterRegistry()
    registry.begin_load("a", "/a")
    registry.rollback_load("a")
    assert registry.begin_load("a", "/b") is not None


def test_a_load_abandoned_without_the_journal_is_undone_and_its_epochs_are_not_given_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    registry = AdapterRegistry(path)
    start = registry.epoch
    load = registry.begin_load("a", "/a")
    assert load is not None
    unload = registry.abandon_load("a")
    assert brief(registry.changes_since(start)) == [("load", "a", load.epoch), ("unload", "a", load.epoch)]
    assert unload.epoch > load.epoch
    assert registry.entries == {}
    assert AdapterRegistry(path).entries == {}, "a restart does not bring it back"
    registry = AdapterRegistry(path)
    registry.begin_load("b", "/b")
    registry.abandon_load("b")
    epoch = registry.epoch
    assert loaded(registry, "b", "/other") > epoch


def test_unknown_names_cannot_be_unloaded() -> None:
    registry = AdapterRegistry()
    loaded(registry, "known", "/k")
    with pytest.raises(AdapterNotFound, match=r"'ghost'.*known"):
        registry.begin_unload("ghost")


def test_changes_are_given_in_order_from_any_epoch() -> None:
    registry = AdapterRegistry()
    start = registry.epoch
    first = loaded(registry, "a", "/a")
    second = loaded(registry, "b", "/b")
    registry.begin_unload("a")
    everything = [("load", "a", first), ("load", "b", second), ("unload", "a", first)]
    assert brief(registry.changes_since(start)) == everything
    assert brief(registry.changes_since(first)) == everything[1:]
    assert registry.changes_since(registry.epoch) == []
    assert registry.changes_since(start - 1) is None, "from before this registry's memory"
    assert registry.changes_since(registry.epoch + 1) is None, "from a future it has not had"


def test_old_changes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "MAX_CHANGES_KEPT", 10)
    registry = AdapterRegistry()
    start = registry.epoch
    for _ in range(20):
        loaded(registry, "a", "/a")
        registry.begin_unload("a")
        registry.finish_unload("a")
    assert registry.changes_since(start) is None
    assert registry.changes_since(registry.epoch - 3) == (registry.changes_since(registry.epoch - 4) or [])[1:]


def test_catching_up_unloads_before_it_loads() -> None:
    registry = AdapterRegistry()
    kept = loaded(registry, "kept", "/k")
    old = loaded(registry, "again", "/old")
    registry.begin_unload("again")
    registry.finish_unload("again")
    new = loaded(registry, "again", "/new")
    registry.begin_load("coming", "/c")
    loaded(registry, "going", "/g")
    registry.begin_unload("going")
    changes = registry.catch_up({"kept": kept, "again": old, "stranger": 7})
    assert brief(changes) == [
        ("unload", "stranger", 7),
        ("load", "again", new),
        ("load", "coming", registry.entries["coming"].generation),
    ]
    assert [change.request.replace for change in changes] == [False, True, False], "old weights make room at once"
    assert [change.epoch for change in changes] == sorted(change.epoch for change in changes)
    assert [name for _, name, _ in brief(registry.catch_up({}))] == ["kept", "again", "coming"]


def test_who_holds_an_adapter_of_unknown_content_is_asked_what_it_found() -> None:
    registry = AdapterRegistry(static={"a": "/a"})
    held = {"a": registry.entries["a"].generation, "b": loaded(registry, "b", "/b")}
    (change,) = registry.catch_up(held)
    assert brief([change]) == [("load", "a", held["a"])]
    assert change.request.replace, "it is there already"
    registry.note_content("a", report(held["a"], "hash of /a"))
    assert registry.catch_up(held) == []


def test_pins_end_before_others_begin(tmp_path: Path) -> None:
    registry = AdapterRegistry()
    held = {name: loaded(registry, name, f"/{name}") for name in "abc"}
    registry.set_pin("a", True)
    changes = brief(registry.catch_up(held, ["b", "c"]))
    assert changes == [("unpin", "b", held["b"]), ("unpin", "c", held["c"]), ("pin", "a", held["a"])]


def test_ready_adapters_survive_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "journal.sqlite"
    first = AdapterRegistry(path)
    generation = loaded(first, "a", "/a")
    loaded(first, "b", "/b")
    first.begin_unload("b")
    epoch = first.epoch
    now_ms = epoch + 1_000
    monkeypatch.setattr("cluster.journal.time.time_ns", lambda: now_ms * 1_000_000)
    # No close: a router that is killed does not close its journal.
    second = AdapterRegistry(path)
    assert second.epoch == now_ms
    assert second.ready() == first.ready()
    assert second.ready()["a"].generation == generation
    assert second.begin_load("b", "/elsewhere") is not None, "an adapter found unloading is gone"


def adapter_folder(folder: Path, weights: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


def test_a_restart_keeps_the_fingerprint_of_what_replicas_hold(tmp_path: Path) -> None:
    journal, static = tmp_path / "journal.sqlite", adapter_folder(tmp_path / "static", b"old")
    first = AdapterRegistry(journal, static={"s": static}, run="1")
    first.begin_load("a", "/a", "files of then")
    first.commit_load("a")
    assert first.entries["s"].fingerprint == folder_fingerprint(static)
    adapter_folder(tmp_path / "static", b"newer")
    second = AdapterRegistry(journal, static={"s": static}, run="1")
    assert second.ready() == first.ready()
    with pytest.raises(AdapterNameTaken, match="changed since"):
        second.begin_load("s", static, folder_fingerprint(static))


def test_a_new_run_serves_changed_files_as_a_new_generation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = tmp_path / "journal.sqlite"
    paths = {name: adapter_folder(tmp_path / name, b"old") for name in ("s", "dynamic", "same")}
    first = AdapterRegistry(journal, static={"s": paths["s"]}, run="1")
    for name in ("dynamic", "same"):
        first.begin_load(name, paths[name], folder_fingerprint(paths[name]))
        first.commit_load(name)
    paths["unknown"] = adapter_folder(tmp_path / "unknown", b"of whatever age")
    for name, path in (("gone", "/g"), ("unknown", paths["unknown"])):
        first.begin_load(name, path)
        unknown = first.commit_load(name).generation
    for name in ("s", "dynamic"):
        adapter_folder(tmp_path / name, b"newer")
    with caplog.at_level(logging.WARNING):
        second = AdapterRegistry(journal, static={"s": paths["s"]}, run="2")
    for name in ("s", "dynamic"):
        assert second.entries[name].generation > first.epoch, "what holds the old files loads the new ones"
        assert second.entries[name].static == (name == "s")
        assert second.begin_load(name, paths[name], folder_fingerprint(paths[name])) is None
        assert paths[name] in caplog.text
    assert [second.entries[name] for name in ("same", "gone")] == [first.entries[name] for name in ("same", "gone")]
    assert second.entries["unknown"].generation == unknown
    assert second.entries["unknown"].fingerprint == folder_fingerprint(paths["unknown"])
    assert AdapterRegistry(journal, static={"s": paths["s"]}, run="2").ready() == second.ready()


def test_a_journal_from_before_fingerprints_opens(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript("""
            CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
            CREATE TABLE adapters (
                name TEXT PRIMARY KEY, path TEXT NOT NULL, generation INTEGER NOT NULL, state TEXT NOT NULL,
                static INTEGER NOT NULL
            ) WITHOUT ROWID;
            CREATE TABLE withdrawn (name TEXT PRIMARY KEY) WITHOUT ROWID;
            INSERT INTO meta VALUES ('epoch', 7);
            INSERT INTO adapters VALUES ('a', '/a', 7, 'ready', 0);
            PRAGMA user_version = 1;
        """)
    registry = AdapterRegistry(path)
    assert (registry.entries["a"].generation, registry.entries["a"].fingerprint) == (7, None)
    registry.begin_load("b", "/b", "files of then")
    registry.commit_load("b")
    again = AdapterRegistry(path)
    assert again.ready() == registry.ready()
    assert again.entries["b"].fingerprint == "files of then"


FORMAT_2 = """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
    CREATE TABLE adapters (
        name TEXT PRIMARY KEY, path TEXT NOT NULL, generation INTEGER NOT NULL, state TEXT NOT NULL,
        static INTEGER NOT NULL, fingerprint TEXT
    ) WITHOUT ROWID;
    CREATE TABLE withdrawn (name TEXT PRIMARY KEY) WITHOUT ROWID;
    INSERT INTO meta VALUES ('epoch', 9), ('owner', 'of then'), ('run', 'r');
    INSERT INTO adapters VALUES ('a', '/a', 7, 'ready', 0, 'files of then'), ('s', '/s', 8, 'ready', 1, NULL),
        ('half', '/h', 9, 'loading', 0, NULL);
    INSERT INTO withdrawn VALUES ('gone');
    PRAGMA user_version = 2;
"""


def test_a_journal_from_before_content_hashes_and_pins_opens_and_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(FORMAT_2)
    registry = AdapterRegistry(path, static={"s": "/s", "gone": "/g"}, run="r")
    found = [
        (e.name, e.generation, e.static, e.fingerprint, e.content_hash, e.pinned) for e in registry.ready().values()
    ]
    assert found == [("a", 7, False, "files of then", None, False), ("s", 8, True, None, None, False)]
    registry.note_content("a", report(7, "h"))
    registry.set_pin("a", True)
    registry.close()
    again = AdapterRegistry(path, static={"s": "/s", "gone": "/g"}, run="r")
    assert again.ready() == registry.ready()
    assert again.report("a") == report(7, "h")
    assert again.report("s") is None


def test_a_report_that_this_version_cannot_read_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    registry = AdapterRegistry(path)
    registry.begin_load("a", "/a")
    registry.commit_load("a", report(1, "h"))
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE adapters SET report = ?", (b'{"generation": "of another version"}',))
        database.commit()
    again = AdapterRegistry(path)
    assert again.report("a") is None
    assert again.entries["a"].content_hash == "h"


def test_a_replacement_is_loaded_beside_what_it_replaces_and_takes_its_place_at_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    registry = AdapterRegistry(path)
    registry.begin_load("a", "/a", "files of then")
    old = registry.commit_load("a", report(1, "h1"))
    registry.set_pin("a", True)
    staging = registry.begin_replace("a", "/b", "files of now")
    assert staging is not None
    assert (staging.request.lora_name, staging.request.replace) == (staged_name("a"), False)
    assert registry.ready() == {"a": msgspec.structs.replace(old, pinned=True)}, "nothing is replaced yet"
    assert AdapterRegistry(path).ready() == registry.ready(), "nor is it for a successor of this router"
    registry = AdapterRegistry(path)
    staging = registry.begin_replace("a", "/b", "files of now")
    assert staging is not None
    swap = registry.commit_replace("a", report(2, "h2"))
    request = swap.request
    assert (request.lora_name, request.lora_path, request.replace) == ("a", "/b", True)
    assert (request.generation, request.content_hash) == (swap.epoch, "h2")
    assert swap.epoch > staging.epoch, "what was staged under another name keeps its own generation"
    assert brief(registry.catch_up({"a": old.generation, staged_name("a"): staging.epoch})) == [
        ("unload", staged_name("a"), staging.epoch),
        ("load", "a", swap.epoch),
        ("pin", "a", swap.epoch),
    ]
    assert brief([registry.finish_replace("a")]) == [("unload", staged_name("a"), staging.epoch)]
    (entry,) = registry.entries.values()
    assert (entry.generation, entry.epoch, entry.fingerprint) == (swap.epoch, swap.epoch, "files of now")
    assert entry.pinned
    assert AdapterRegistry(path).ready() == registry.ready()


def test_a_replacement_of_files_known_to_be_served_is_none() -> None:
    registry = AdapterRegistry()
    look, others = "0" * 32, "2" * 32
    registry.begin_load("a", "/a", f"{look}-1")
    registry.commit_load("a")
    assert registry.begin_replace("a", "/a", f"{look}-1") is None
    for found in (None, look, f"{look}-2", f"{others}-1"):
        staging = registry.begin_replace("a", "/a", found)
        assert staging is not None, "no one knows"
        registry.rollback_load(staging.request.lora_name)
    loading = registry.begin_replace("new", "/n")
    assert loading is not None
    assert loading.request.lora_name == "new", "there is nothing to replace"


def test_content_that_moved_is_the_same_generation(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    registry = AdapterRegistry(path)
    registry.begin_load("a", "/a")
    before = registry.commit_load("a", report(1, "h"))
    staging = registry.begin_replace("a", "/b", "files there")
    assert staging is not None
    kept = registry.keep_content("a")
    registry.rollback_load(staging.request.lora_name)
    assert kept == msgspec.structs.replace(before, path="/b", fingerprint="files there")
    assert AdapterRegistry(path).ready() == registry.ready() == {"a": kept}


def test_a_static_adapter_replaced_from_elsewhere_is_the_configurations_again_in_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    registry = AdapterRegistry(path, static={"a": "/a", "b": "/b"}, run="1")
    for name in ("a", "b"):
        registry.begin_replace(name, "/other" if name == "a" else "/b")
        registry.commit_replace(name, report(1, "h"))
        registry.finish_replace(name)
    ready = registry.ready()
    assert [(entry.path, entry.static) for entry in ready.values()] == [("/other", False), ("/b", True)]
    assert AdapterRegistry(path, static={"a": "/a", "b": "/b"}, run="1").ready() == ready, "the router only restarted"
    anew = AdapterRegistry(path, static={"a": "/a", "b": "/b"}, run="2").ready()
    assert [(anew[name].path, anew[name].static) for name in "ab"] == [("/a", True), ("/b", True)]


def test_pins_are_bounded_idempotent_and_journalled(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    registry = AdapterRegistry(path)
    for name in "abc":
        loaded(registry, name, f"/{name}")
    change = registry.set_pin("a", True, most=2)
    assert brief([change] if change else None) == [("pin", "a", registry.entries["a"].generation)]
    assert registry.set_pin("a", True, most=2) is None
    assert registry.set_pin("c", False) is None
    registry.set_pin("b", True, most=2)
    with pytest.raises(AdapterError, match=r"'c' was not pinned: with it 3 adapter\(s\) would be, and at most 2 can"):
        registry.set_pin("c", True, most=2)
    with pytest.raises(AdapterNotFound, match=r"'ghost'.*a, b, c"):
        registry.set_pin("ghost", True)
    again = AdapterRegistry(path)
    assert [entry.name for entry in again.ready().values() if entry.pinned] == ["a", "b"]
    held = {name: entry.generation for name, entry in again.ready().items()}
    assert brief(again.catch_up(held, ["b", "c"])) == [("unpin", "c", held["c"]), ("pin", "a", held["a"])]
    assert [name for operation, name, _ in brief(again.catch_up({}, ["b"])) if operation == "pin"] == ["a", "b"]
    again.begin_unload("a")
    again.finish_unload("a")
    loaded(again, "a", "/a")
    assert not again.entries["a"].pinned, "a pin ends with what was pinned"


def test_a_new_run_expects_the_content_of_files_that_are_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The files were written some time ago.
    clock = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: clock() + 3 * 10**9)
    journal = tmp_path / "journal.sqlite"
    paths = {name: adapter_folder(tmp_path / name, b"old") for name in ("same", "changed", "gone")}
    first = AdapterRegistry(journal, run="1")
    for name, path in paths.items():
        first.begin_load(name, path, folder_fingerprint(path))
        first.commit_load(name, report(1, f"hash of {name}"))
        first.set_pin(name, True)
    adapter_folder(tmp_path / "changed", b"newer")
    (tmp_path / "gone").rename(tmp_path / "elsewhere")
    kept = AdapterRegistry(journal, run="1").ready()
    assert [kept[name].content_hash for name in paths] == [f"hash of {name}" for name in paths]
    second = AdapterRegistry(journal, run="2")
    assert [second.entries[name].content_hash for name in paths] == ["hash of same", None, None]
    assert [second.report(name) is None for name in paths] == [False, True, True]
    assert all(entry.pinned for entry in second.entries.values())


def test_an_interrupted_load_is_dropped_and_replicas_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal.sqlite"
    first = AdapterRegistry(path)
    change = first.begin_load("half", "/h")
    assert change is not None
    second = AdapterRegistry(path)
    assert second.entries == {}
    assert "half" in caplog.text
    assert brief(second.catch_up({"half": change.epoch})) == [("unload", "half", change.epoch)]
    retry = second.begin_load("half", "/h")
    assert retry is not None
    assert retry.epoch > change.epoch


def test_generations_are_not_reused_by_a_new_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    first = AdapterRegistry(path)
    generation = loaded(first, "a", "/a")
    first.close()
    for file in tmp_path.iterdir():
        file.unlink()
    time.sleep(0.005)  # A new process takes longer to start.
    second = AdapterRegistry(path)
    assert loaded(second, "a", "/b") > generation
    assert loaded(AdapterRegistry(), "a", "/c") > generation


def test_static_adapters_are_ready_from_the_start() -> None:
    registry = AdapterRegistry(static={"a": "/a"})
    assert registry.ready()["a"].static
    (change,) = registry.catch_up({})
    assert change.static


def test_the_configuration_is_merged_into_the_journal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal.sqlite"
    first = AdapterRegistry(path, static={"same": "/s", "dropped": "/d", "moved": "/old"}, run="1")
    loaded(first, "dynamic", "/x")
    loaded(first, "claimed", "/theirs")
    with caplog.at_level(logging.WARNING):
        second = AdapterRegistry(path, static={"same": "/s", "moved": "/new", "claimed": "/ours"}, run="2")
    ready = second.ready()
    assert {name: entry.path for name, entry in ready.items()} == {
        "same": "/s",
        "moved": "/new",
        "claimed": "/ours",
        "dynamic": "/x",
    }
    assert ready["same"] == first.ready()["same"], "same name and path: nothing for replicas to do"
    assert ready["moved"].generation > first.epoch
    assert "'/new'" in caplog.text
    assert "'/old'" in caplog.text
    assert "dropped" in caplog.text


def test_a_static_adapter_unloaded_at_run_time_stays_away_until_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    registry = AdapterRegistry(path, static={"a": "/a"}, run="1")
    registry.begin_unload("a")
    registry.finish_unload("a")
    assert AdapterRegistry(path, static={"a": "/a"}, run="1").ready() == {}, "the router only restarted"
    assert "a" in AdapterRegistry(path, static={"a": "/a"}, run="2").ready(), "the server was started anew"


def test_the_last_to_open_a_journal_owns_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    old = AdapterRegistry(path)
    new = AdapterRegistry(path)
    with pytest.raises(LoRAFleetError, match="replaced"):
        old.begin_load("a", "/a")
    assert old.entries == {}, "what could not be written did not happen"
    assert old.changes_since(old.epoch) == []
    assert loaded(new, "a", "/a") > old.epoch


def test_each_deployment_has_a_journal_of_its_own_in_the_session(tmp_path: Path) -> None:
    names = [("a", "b"), ("a+b", ""), ("", "a+b"), ("a", "b+c"), ("a+b", "c"), ("../up", "x/y"), ("..", "..")]
    files = [session_journal(tmp_path, app, deployment) for app, deployment in names]
    assert len(set(files)) == len(names)
    assert {file.resolve().parent for file in files} == {tmp_path.resolve()}
    assert session_journal(tmp_path, "a", "b") == files[0]


@pytest.mark.parametrize("content", [b"not a database, but long enough to be read as one" * 9, None])
def test_an_unusable_journal_is_refused_with_the_setting(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "journal.sqlite"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"journal\.sqlite.*`router\.journal`"):
        AdapterRegistry(path)


def test_a_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(ConfigError, match="format 99"):
        AdapterRegistry(path)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["load", "refused", "replace", "refused replace", "unload", "crash"]),
        st.sampled_from("abc"),
        st.sampled_from("xy"),
    ),
    max_size=25,
)


@settings(max_examples=25, deadline=None)
@given(operations=OPERATIONS)
def test_a_replica_that_catches_up_after_any_history_holds_what_is_desired(
    operations: list[tuple[str, str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any mix of loads, replacements, unloads and crashes, seen by a replica that listens now and then."""
    path = tmp_path_factory.mktemp("history") / "journal.sqlite"
    registry, holding, generations = AdapterRegistry(path), dict[str, int](), list[int]()
    for position, (operation, name, source) in enumerate(operations):
        try:
            if operation in ("load", "refused") and registry.begin_load(name, source) is not None:
                generations.append(registry.epoch)
                registry.commit_load(name) if operation == "load" else registry.rollback_load(name)
            elif operation in ("replace", "refused replace"):
                change = registry.begin_replace(name, source)
                assert change is not None
                generations.append(registry.epoch)
                if operation == "refused replace":
                    registry.rollback_load(change.request.lora_name)
                elif change.request.lora_name == name:
                    registry.commit_load(name)
                else:
                    generations.append(registry.commit_replace(name, None).epoch)
                    if position % 2:
                        apply(registry.catch_up(holding), holding)
                    registry.finish_replace(name)
            elif operation == "unload":
                registry.begin_unload(name)
                registry.finish_unload(name)
            elif operation == "crash":
                registry = AdapterRegistry(path)
        except (AdapterNameTaken, AdapterNotFound):
            pass
        if position % 3 == 0:
            apply(registry.catch_up(holding), holding)
    apply(registry.catch_up(holding), holding)
    assert holding == {name: entry.generation for name, entry in registry.ready().items()}
    assert generations == sorted(set(generations)), "a generation is given once"


def apply(changes: list[Change], holding: dict[str, int]) -> None:
    """What a replica does: an adapter must be unloaded before its name can be loaded again, or replaced in place."""
    for change in changes:
        name, generation = change.request.lora_name, change.request.generation
        assert generation is not None
        if change.request.operation is LoRAOperation.LOAD:
            assert change.request.replace == (name in holding)
            holding[name] = generation
        else:
            assert holding.pop(name) == generation
