"""Slots for adapters before requests come for them: warm-ups, protection, and what is told of it."""

import pytest

from lora_core.adapter_state import AdapterState
from lora_core.errors import AdapterLost, AdapterNotFound
from lora_core.readiness import Readiness
from lora_core.types import AdapterRef
from lora_core.whereabouts import FEW, Whereabouts
from tests.unit.stepped_scheduler import SIZE, record
from tests.unit.test_adapters import Table


class WarmTable(Table):
    """A table whose warm-ups are written at once."""

    def names_in_slots(self) -> list[str]:
        return [ref.name for ref in self.whereabouts.residency()[0]]

    def warm(self, name: str) -> list[str]:
        """Ask for a warm-up, and go on with all of them as far as it goes; returns who is in slots then."""
        self.wanted.warm_up(name)
        while (found := self.wanted.assign_warm_up()) is not None:
            self.finish_write(found[0])
        self.check()
        return self.names_in_slots()

    def run(self, name: str) -> AdapterRef:
        """Run a request."""
        ref = self.acquire(name)
        assert self.start(ref) is Readiness.READY
        self.pin(ref)
        return ref


def loaded(num_slots: int, names: str = "abcd", host_adapters: int = 100) -> WarmTable:
    table = WarmTable(num_slots, host_adapters)
    for name in names:
        table.load(name)
    return table


def test_an_adapter_comes_to_a_free_slot_and_keeps_it_until_another_is_needed() -> None:
    table = loaded(2)
    assert table.wanted.warm_up("a") is Readiness.READING
    assert table.wanted.is_warming
    assert table.warm("a") == ["a"]
    assert not table.wanted.is_warming
    assert table.wanted.warm_up("a") is Readiness.READY
    for name in "bc":
        table.run(name)
    assert table.names_in_slots() == ["c", "b"], "it made room like any other"
    with pytest.raises(AdapterNotFound):
        table.wanted.warm_up("absent")


def test_no_slot_is_taken_that_anybody_uses_or_wants_kept() -> None:
    table = loaded(4, "abcdef")
    table.run("a")
    table.wanted.pin("b")
    for name in "bcd":
        table.put(table.acquire(name))
    table.release(AdapterRef("c", 3))
    table.wanted.protect(["c"])
    # In the slots: one that runs, one that is pinned, one that is protected, and one that a request waits for.
    assert table.wanted.warm_up("e") is Readiness.NO_SLOT
    assert not table.wanted.is_warming
    assert table.names_in_slots() == list("abcd")
    table.wanted.protect([])
    assert table.warm("e") == list("abed")


def test_requests_that_wait_for_a_slot_come_first() -> None:
    table = loaded(2)
    running = table.run("a")
    table.wanted.warm_up("b")
    waiting = table.acquire("c")
    assert table.prepare(waiting, take_slot=False).readiness is Readiness.SLOT_AVAILABLE
    assert table.wanted.assign_warm_up() is None
    assert table.wanted.is_warming
    assert table.start(waiting) is Readiness.READY
    assert table.warm("b") == ["a", "c"], "that slot is meant for the request"
    assert not table.wanted.is_warming
    table.release(waiting)
    assert table.warm("b") == ["a", "b"]
    table.unpin(running)


def test_files_are_read_after_those_that_requests_wait_for_and_one_at_a_time() -> None:
    table = loaded(3, "abcd", host_adapters=1)
    assert table.whereabouts.status("d").tier == "host"
    for name in "ab":
        assert table.wanted.warm_up(name) is Readiness.READING
    a, b, c = (table.whereabouts.residency()[1])[:3]
    table.acquire("c")
    table.prepare(c)
    table.read(c)
    assert table.start(c) is Readiness.READY
    job = table.reads.next()
    assert job is not None
    assert job[0] == a
    assert table.reads.next() is None
    table.reads.end(a, "a")
    assert table.warm("a") == ["c", "a"]
    table.read(b)
    assert table.warm("b") == ["c", "a", "b"]


def test_what_left_memory_before_it_came_to_a_slot_is_not_read_again_and_again() -> None:
    table = loaded(2, "ab", host_adapters=1)
    busy, *_ = (table.load(name) for name in "xy")
    table.run("y")
    (a, _, busy, _) = table.whereabouts.residency()[1]
    table.wanted.warm_up("a")
    table.read(a)
    # Somebody waits, so that the slot is not to spare, and what waits for it takes the memory.
    table.acquire("x")
    assert table.prepare(busy).readiness is Readiness.READING
    assert table.wanted.assign_warm_up() is None
    table.read(busy)
    table.start(busy)
    table.release(busy)
    assert table.reads.next() is None
    assert not table.wanted.is_warming
    table.check()


def test_a_request_that_comes_meanwhile_gets_the_slot_that_is_being_written() -> None:
    table = loaded(1)
    table.wanted.warm_up("a")
    found = table.wanted.assign_warm_up()
    assert found is not None
    assert table.wanted.can_wait(found[0]), "nobody waits for it"
    ref = table.acquire("a")
    assert table.prepare(ref).readiness is Readiness.WRITING
    assert not table.wanted.can_wait(ref)
    table.finish_write(ref)
    other = table.acquire("b")
    assert table.prepare(other).readiness is Readiness.NO_SLOT, "it is kept for the request"
    table.pin(ref)
    table.check()


def test_a_warm_up_that_fails_leaves_nothing() -> None:
    table = loaded(1, "ab", host_adapters=1)
    a = table.whereabouts.residency()[1][0]
    for end in ("fail", "give_up"):
        table.wanted.warm_up("a")
        assert table.reads.next() is not None
        if end == "fail":
            table.reads.fail(a, AdapterLost("gone"))
        else:
            table.reads.give_up(a, "it takes too long")
        assert not table.wanted.is_warming
        table.check()
    assert table.wanted.warm_up("a") is Readiness.NO_SLOT, "while that read goes on"
    table.retire("a")
    table.wanted.warm_up("b")
    table.retire("b")
    assert not table.wanted.is_warming
    table.check()


def test_a_warm_up_finds_no_memory_where_all_is_claimed() -> None:
    table = loaded(2, "ab", host_adapters=1)
    found = table.prepare(table.acquire("b"))
    assert found.slot is not None, "b is being written from memory, which it claims meanwhile"
    table.wanted.warm_up("a")
    assert table.reads.next() is None
    assert not table.wanted.is_warming
    assert table.whereabouts.status("a").tier == "disk"
    table.check()


def test_a_protected_adapter_goes_last_also_under_another_generation() -> None:
    table = loaded(2)
    table.wanted.protect(["a", "absent"])
    table.put(table.resolve("a"))
    table.put(table.resolve("b"))
    table.put(table.resolve("c"))
    assert table.names_in_slots() == ["a", "c"]
    newer = table.renumber("a", 50)
    table.put(newer)
    table.put(table.resolve("b"))
    table.put(table.resolve("d"))
    assert table.names_in_slots() == ["a", "d"]
    table.wanted.protect(["b"])
    table.put(table.resolve("c"))
    assert table.names_in_slots() == ["c", "d"]


def test_a_reset_adapter_is_read_anew_and_keeps_its_pin() -> None:
    table = loaded(2)
    a = table.resolve("a")
    table.wanted.pin("a")
    table.start(table.acquire("a"))
    table.release(a)
    table.reset("a")
    table.reset("absent")
    assert table.whereabouts.status("a").tier == "disk"
    assert table.wanted.pinned_without_slot() == [a]
    table.check()
    assert table.prepare(a).readiness is Readiness.READING
    table.read(a)
    assert table.start(a) is Readiness.READY
    table.check()
    running = table.run("b")
    table.reset("b")
    assert table.slot_of(running) is not None, "it is in use"


# What is told


def test_reports_tell_what_is_on_its_way_and_an_eviction_before_the_slot_is_written() -> None:
    table = loaded(1)
    views = table.whereabouts
    first = views.next_report()
    assert first is not None
    assert views.next_report() is None
    a, b = table.resolve("a"), table.resolve("b")
    assert table.put(a) == 0
    report = views.next_report()
    assert report is not None
    assert (report.resident, report.loading, report.num_slots_used) == ([a], [], 1)
    assert (report.loaded, report.in_memory) == (None, None), "that is as it was"
    table.wanted.warm_up("b")
    asked = views.next_report()
    assert asked is not None
    assert (asked.resident, asked.loading) == ([a], [b])
    found = table.wanted.assign_warm_up()
    assert found is not None
    before = views.next_report()
    assert before is not None
    assert (before.resident, before.loading, before.num_slots_used) == ([], [b], 1)
    table.finish_write(b)
    after = views.next_report()
    assert after is not None
    assert (after.resident, after.loading) == ([b], [])
    assert first.sequence < report.sequence < asked.sequence < before.sequence < after.sequence
    full = after.over(first)
    assert full is not None
    assert (full.loaded, full.in_memory) == (first.loaded, first.in_memory)
    assert after.over(None) is None
    assert full.without(first) == after
    assert full.without(None) == full


def test_users_are_counted_as_hits_or_misses_and_evictions_as_they_happen() -> None:
    table = loaded(1)
    a, b = table.acquire("a"), table.acquire("b")
    table.put(a)
    table.acquire("a")
    table.put(b)
    table.acquire("a")
    counts = table.whereabouts.slot_counts()
    assert (counts.num_hits, counts.num_misses, counts.num_evictions) == (1, 3, 1)


def test_long_lists_are_told_seldom_and_never_forgotten() -> None:
    now_s = 0.0
    state: AdapterState[str] = AdapterState(1, 10_000 * SIZE)
    views = Whereabouts(state, lambda: now_s)

    def load(name: str) -> None:
        state.supersede(None, state.loaded.identify(name, None), record(name), name)

    for index in range(FEW):
        load(f"a{index}")
    told = views.next_report()
    assert told is not None
    assert told.loaded is not None
    assert len(told.loaded) == FEW
    load("another")
    assert views.next_report() is not None
    news = told
    for count in (1, 2):
        load(f"more{count}")
        report = views.next_report()
        assert report is not None
        news = report
        assert (news.loaded, news.in_memory) == (None, None)
        assert views.next_report() is None
    now_s = 1.0
    late = views.next_report()
    assert late is not None
    assert late.loaded is not None
    assert late.sequence > news.sequence
    assert len(late.loaded) == FEW + 3
    assert late.in_memory == late.loaded
    assert views.next_report() is None
