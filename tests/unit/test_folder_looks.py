"""Looks at folders whose storage hangs: they cost their own adapter some time, and nobody else anything."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from deployments import folder_looks
from deployments.folder_looks import FolderLooks
from lora_core.errors import RequestTimeout
from lora_core.types import LoRAStatus
from tests.unit.router_fleet import Replica, fleet, make_router, settled


class Storage:
    """Answers for every path but those that hang."""

    def __init__(self) -> None:
        self.hanging: set[str] = set()
        self.answers = threading.Event()
        self.asked: list[str] = []

    def spelling(self, path: str) -> str:
        self._ask(path)
        return f"/real{path}"

    def fingerprint(self, path: str) -> str | None:
        self._ask(path)
        if "broken" in path:
            raise OSError("input/output error")
        return f"files of {path}"

    def _ask(self, path: str) -> None:
        self.asked.append(path)
        if path in self.hanging:
            self.answers.wait(10)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    storage = Storage()
    monkeypatch.setattr(folder_looks, "one_spelling", storage.spelling)
    monkeypatch.setattr(folder_looks, "folder_fingerprint", storage.fingerprint)
    yield storage
    storage.answers.set()


def num_threads() -> int:
    return sum(thread.name == folder_looks.THREADS for thread in threading.enumerate())


async def test_what_is_seen_is_told(storage: Storage) -> None:
    looks = FolderLooks()
    assert await looks.spelling("/a") == "/real/a"
    assert await looks.fingerprint("/a") == "files of /a"
    with pytest.raises(OSError, match="input/output error"):
        await looks.fingerprint("/broken")


async def test_a_path_that_hangs_is_looked_at_by_one_thread_however_often_it_is_asked_for(storage: Storage) -> None:
    storage.hanging = {"/hung"}
    looks = FolderLooks(patience_s=0.05)
    for _ in range(3):
        asked = [looks.fingerprint("/hung") for _ in range(3)]
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(answer, RequestTimeout)
            assert "the storage of '/hung' has not answered within 0.05 s" in str(answer)
        assert await looks.fingerprint("/fine") == "files of /fine"
    await settled(lambda: num_threads() == 1)
    assert storage.asked.count("/hung") == 1
    storage.answers.set()
    await settled(lambda: num_threads() == 0)
    assert await looks.fingerprint("/hung") == "files of /hung"


async def test_a_load_from_storage_that_hangs_holds_up_no_other_and_can_be_repeated(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_looks, "PATIENCE_S", 0.2)
    storage.hanging = {"/hung", "/real/late"}
    router = make_router()
    async with fleet(router, Replica(router, "r0")) as (replica,):
        hung = [asyncio.create_task(router.load("a", "/hung")), asyncio.create_task(router.load("b", "/late"))]
        hung += [asyncio.create_task(router.load(f"more {number}", "/hung")) for number in range(20)]
        assert (await router.load("c", "/c")).status is LoRAStatus.SUCCESS
        assert not any(task.done() for task in hung), "it waited for the others"
        outcomes = await asyncio.gather(*hung)
        assert {outcome.status for outcome in outcomes} == {LoRAStatus.UNAVAILABLE}
        assert "'/hung' has not answered" in outcomes[0].message
        assert replica.paths == {"c": "/real/c"}
        assert router._operations.last_errors["a"].text == outcomes[0].message
        storage.answers.set()
        for name, path in (("a", "/hung"), ("b", "/late")):
            assert (await router.load(name, path)).status is LoRAStatus.SUCCESS
        assert replica.paths == {"a": "/real/hung", "b": "/real/late", "c": "/real/c"}


async def test_a_final_path_is_not_spelled_otherwise(storage: Storage) -> None:
    router = make_router()
    async with fleet(router, Replica(router, "r0")) as (replica,):
        await router.load("a", "/a", False, True)
        assert replica.paths == {"a": "/a"}
        assert storage.asked == ["/a"], "its files were looked at, and nothing else"
