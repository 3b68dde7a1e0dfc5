"""The journal where its storage fails, is shared, or is wanted by two."""

import resource
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from cluster import journal as journal_module
from cluster.journal import AdapterRow, Journal
from cluster.registry import AdapterRegistry
from lora_core.errors import ConfigError, LoRAFleetError
from lora_core.types import LoRAStatus
from tests.unit.router_fleet import Replica, fleet, make_router, names, settled


@contextmanager
def no_space() -> Iterator[None]:
    """Have the system refuse every write to a file, as a full disk or a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def row(name: str) -> AdapterRow:
    return AdapterRow(name, f"/{name}", 1, "ready", static=False, fingerprint=None)


async def test_on_a_full_disk_every_change_is_refused_with_the_reason_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    router = make_router(journal=str(path), num_slots=3)
    async with fleet(router, Replica(router, "r0"), Replica(router, "r1")) as replicas:
        for name in ("a", "b"):
            await router.load(name, f"/{name}")
        await router.set_alias("x", {"a": 1})
        await router.set_alias("x", {"b": 1})
        before, holding = await router.table(), dict(replicas[0].holding)
        with no_space():
            outcomes = [
                await router.load("c", "/c"),
                await router.load("a", "/new", load_inplace=True),
                await router.unload("a"),
                await router.pin("a"),
            ]
            for outcome in outcomes:
                assert outcome.status not in (LoRAStatus.SUCCESS, LoRAStatus.PARTIAL), outcome
                assert "nothing was changed" in outcome.message
                assert str(path) in outcome.message
                assert "free space" in outcome.message
            for move in (
                router.set_alias("x", {"a": 1, "b": 1}),
                router.roll_back_alias("x"),
                router.remove_alias("x"),
                router.set_min_copies("a", 2),
            ):
                with pytest.raises(LoRAFleetError, match="nothing was changed"):
                    await move
            after = await router.table()
            assert (after.adapters, after.aliases) == (before.adapters, before.aliases)
            late = await Replica(router, "late").start()
            assert late.holding == holding, "replicas come and go as before"
        assert [replica.holding for replica in replicas] == [holding] * 2
        assert (await router.load("c", "/c")).status is LoRAStatus.SUCCESS, "there is space again"
        await settled(lambda: late.holding == replicas[0].holding)
        assert (await router.roll_back_alias("x")).targets == {"a": 1.0}
        served, aliases = await names(router), await router.aliases()
        await late.stop()
    successor = make_router(journal=str(path))
    assert (await names(successor), await successor.aliases()) == (served, aliases)
    await successor.close()


def test_a_journal_that_cannot_be_made_is_refused_with_the_setting(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with no_space(), pytest.raises(ConfigError, match=r"cannot be opened .*`router\.journal`"):
        Journal(path)


@pytest.mark.parametrize(("shared", "mode"), [(False, "wal"), (True, "truncate")])
def test_shared_storage_gets_a_journal_that_needs_no_shared_memory(
    shared: bool, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "is_shared", lambda path: shared)
    path = tmp_path / "journal.sqlite"
    registry = AdapterRegistry(path)
    registry.begin_load("a", "/a")
    registry.commit_load("a")
    (found,) = registry._journal._database.execute("PRAGMA journal_mode").fetchone()
    assert found == mode
    assert (path.parent / f"{path.name}-shm").exists() == (not shared)
    second = AdapterRegistry(path)
    assert second.ready() == registry.ready()
    monkeypatch.setattr(journal_module, "BUSY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(journal_module, "is_shared", lambda path: not shared)
    third = AdapterRegistry(path)
    assert third.ready() == registry.ready(), "while others have it open, it stays as it is"
    for open_one in (registry, second, third):
        open_one.close()
    last = AdapterRegistry(path)
    assert last.ready().keys() == {"a"}, "a journal may move from one kind of storage to the other"
    (found,) = last._journal._database.execute("PRAGMA journal_mode").fetchone()
    assert found != mode
    last.close()


WRITER = """
import sys
import time
from pathlib import Path
from cluster import journal
from lora_core.errors import LoRAFleetError

journal.is_shared = lambda path: sys.argv[2] == "shared"
mine = journal.Journal(Path(sys.argv[1]))
print("open", flush=True)
written = 0
try:
    while True:
        with mine.transaction() as write:
            epoch = write.next_epoch()
            write.put(journal.AdapterRow(f"{sys.argv[3]}-{written}", "/", epoch, "ready", False, None))
        written += 1
        # A router does other things between two changes.
        time.sleep(0.002)
except LoRAFleetError as error:
    print(written, "replaced" in str(error), flush=True)
"""


@pytest.mark.parametrize("storage", ["own", "shared"])
def test_of_two_processes_the_later_one_writes_and_the_earlier_one_is_told(storage: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    command = [sys.executable, "-c", WRITER, str(path), storage]
    with ExitStack() as stack:
        processes = []
        for name in ("first", "second", "third"):
            process = stack.enter_context(subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            processes.append(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n", "neither waits for the other for long"
        last = Journal(path)
        told = [process.communicate(timeout=30)[0].split() for process in processes]
    assert [replaced for _, replaced in told] == ["True"] * 3
    written = last.adapters()
    assert len(written) == sum(int(number) for number, _ in told)
    assert len({found.generation for found in written}) == len(written), "an epoch is given out once"
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with last.transaction() as write:
        write.put(row("mine"))
    last.close()


def test_no_generation_is_given_out_twice_where_the_journal_is_taken_from_a_backup(tmp_path: Path) -> None:
    path, backup = tmp_path / "journal.sqlite", tmp_path / "backup.sqlite"
    with closing(AdapterRegistry(path)) as registry:
        registry.begin_load("a", "/a")
        registry.commit_load("a")
    shutil.copy(path, backup)
    with closing(AdapterRegistry(path)) as registry:
        # As many as a fleet makes in the time it takes to notice that the journal is lost.
        time.sleep(0.1)
        for name in "bcdef":
            registry.begin_load(name, f"/{name}")
            registry.commit_load(name)
        given = {entry.generation for entry in registry.served.values()}
    shutil.copy(backup, path)
    with closing(AdapterRegistry(path)) as registry:
        assert list(registry.served) == ["a"]
        change = registry.begin_load("g", "/g")
        assert change is not None
        assert change.epoch > max(given)
