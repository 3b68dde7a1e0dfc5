"""What router actors are told of loads: together, seldom twice, and nobody waits for it."""

import asyncio
import gc
import weakref
from collections.abc import Mapping

import pytest

from deployments.load_notes import AGAIN_S, LoadNotes, ReplicaKey

R0, R1 = ReplicaKey("router", "r0"), ReplicaKey("router", "r1")


class Router:
    def __init__(self) -> None:
        self.told: list[Mapping[str, list[str]]] = []
        self.error: Exception | None = None

    async def note_loads(self, loads: Mapping[str, list[str]]) -> None:
        self.told.append(loads)
        if self.error is not None:
            raise self.error


@pytest.fixture
def router() -> Router:
    return Router()


async def settle() -> None:
    await asyncio.sleep(0.03)


async def test_loads_that_begin_together_are_told_together(router: Router) -> None:
    other = Router()
    notes = LoadNotes({"router": router, "other": other}.get)
    for key, adapter in ((R0, "b"), (R0, "a"), (R1, "a"), (ReplicaKey("other", "r9"), "a"), (ReplicaKey("", "r"), "a")):
        notes.add(key, adapter)
    await settle()
    assert router.told == [{"r0": ["a", "b"], "r1": ["a"]}]
    assert other.told == [{"r9": ["a"]}]


async def test_a_load_is_told_of_again_only_after_a_while(router: Router) -> None:
    now = 0.0
    notes = LoadNotes({"router": router}.get, clock=lambda: now)
    for share in (0.0, 0.5, 0.9):
        now = share * AGAIN_S
        notes.add(R0, "a")
        await settle()
    assert len(router.told) == 1
    now = AGAIN_S
    notes.add(R0, "a")
    await settle()
    assert len(router.told) == 2


async def test_what_is_remembered_is_bounded(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.load_notes.MAX_REMEMBERED", 8)
    now = 0.0
    notes = LoadNotes({"router": router}.get, clock=lambda: now)
    for index in range(100):
        now += AGAIN_S
        notes.add(R0, f"a{index}")
    assert len(notes._told_at) <= 8
    await settle()
    assert len(router.told[0]["r0"]) == 100


async def test_a_router_actor_that_cannot_be_told_harms_nobody(router: Router) -> None:
    router.error = RuntimeError("gone")
    notes = LoadNotes({"router": router}.get)
    notes.add(R0, "a")
    notes.add(ReplicaKey("unknown", "r0"), "a")
    await settle()
    notes.add(R1, "a")
    await settle()
    assert len(router.told) == 2


async def test_notes_do_not_keep_a_handle_alive(router: Router) -> None:
    notes = LoadNotes({"router": router}.get)
    notes.add(R0, "a")
    gone = weakref.ref(notes)
    del notes
    gc.collect()
    assert gone() is None
    await settle()
    assert router.told == []
