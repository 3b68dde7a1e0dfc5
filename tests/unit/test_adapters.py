"""The table of loaded adapters: names, generations, users, pins, tiers, and the slots they hold."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lora_core.adapters import AdapterTable
from lora_core.errors import AdapterLost, AdapterNameTaken, AdapterNotFound
from lora_core.messages import Residency
from lora_core.operator_pins import PinRefused
from lora_core.readiness import Readiness
from lora_core.slots import NoFreeSlot
from lora_core.tiers import READ_AHEAD
from lora_core.types import AdapterRef
from tests.unit.stepped_scheduler import SIZE, record


class Table(AdapterTable[str]):
    """A table of adapters of one size; the name is what is loaded as tensors unless said."""

    def __init__(self, num_slots: int, host_adapters: int = 100) -> None:
        super().__init__(num_slots, host_adapters * SIZE)

    def load(self, name: str, tensors: str | None = None, generation: int | None = None) -> AdapterRef:
        return self.add(name, record(name), tensors or name, generation)

    def put(self, ref: AdapterRef) -> int:
        """Activate: assign a slot and write it, or refresh the one there is."""
        slot = self.use_slot(ref)
        if slot is None:
            slot = self.assign(ref)
            self.finish_write(ref)
        return slot

    def read(self, ref: AdapterRef) -> None:
        """Let the next read, which must be of this adapter, end well."""
        job = self.reads.next()
        assert job is not None
        assert job[0] == ref
        self.reads.end(ref, ref.name)

    def start(self, ref: AdapterRef) -> Readiness:
        """Prepare for a request, and write the slot if there is one."""
        found = self.prepare(ref)
        if found.slot is None:
            return found.readiness
        self.finish_write(ref)
        return self.prepare(ref).readiness


# Names, generations, users


def test_a_retired_adapter_lives_until_its_last_release() -> None:
    table = Table(2)
    table.load("a", "old weights")
    first, second = table.acquire("a"), table.acquire("a")
    assert first == second
    table.put(first)
    assert table.retire("a") == 2
    assert table.retired() == [first]
    with pytest.raises(AdapterNotFound):
        table.acquire("a")
    assert table.tensors_of(first) == "old weights"
    table.release(first)
    assert table.slot_of(first) == 0
    table.release(second)
    assert table.slot_of(first) is None
    assert table.tensors_of(first) is None
    assert table.retired() == []
    with pytest.raises(KeyError, match="not loaded"):
        table.assign(first)


def test_a_name_loaded_again_is_another_adapter() -> None:
    table = Table(2)
    old = table.load("a", "old weights")
    table.acquire("a")
    table.put(old)
    table.retire("a")
    new = table.load("a", "new weights")
    assert new.generation != old.generation
    assert table.put(new) == 1
    assert table.tensors_of(old) == "old weights"
    assert table.acquire("a") == new
    assert table.whereabouts.residency() == ([new], [new])
    assert table.whereabouts.status("a").draining == [old.generation]
    table.release(old)
    assert {slot: ref for slot, (ref, _) in table.whereabouts.residents().items()} == {1: new}


def test_an_unused_adapter_is_dropped_at_once() -> None:
    table = Table(1)
    ref = table.load("a")
    table.put(ref)
    assert table.retire("a") == 0
    assert table.slot_of(ref) is None
    assert table.whereabouts.records() == {}
    with pytest.raises(AdapterNotFound, match="loaded adapters: none"):
        table.retire("a")


def test_generations_that_are_gone_for_good_are_told_once_each() -> None:
    table = Table(2)
    kept, used, unused = (table.load(name) for name in ("kept", "used", "unused"))
    table.acquire("used")
    table.retire("used")
    table.retire("unused")
    assert table.take_dropped() == [unused]
    newer = table.renumber("kept", 100)
    assert table.take_dropped() == [kept]
    table.release(used)
    assert table.take_dropped() == [used]
    assert table.take_dropped() == []
    assert newer in table.whereabouts.residency()[1]


def test_a_pinned_slot_outlives_the_last_release() -> None:
    table = Table(1)
    table.load("a")
    ref = table.acquire("a")
    table.put(ref)
    table.pin(ref)
    table.retire("a")
    table.release(ref)
    assert table.slot_of(ref) == 0
    table.unpin(ref)
    assert table.slot_of(ref) is None


def test_generations_are_the_callers_or_fresh_and_never_reused() -> None:
    table = Table(1)
    assert table.load("a", generation=7) == AdapterRef("a", 7)
    assert table.load("b") == AdapterRef("b", 8)
    table.retire("a")
    with pytest.raises(ValueError, match="generation 7 was given"):
        table.load("c", generation=7)
    assert table.load("a", generation=3) == AdapterRef("a", 3)
    assert table.load("d") == AdapterRef("d", 9)
    with pytest.raises(AdapterNameTaken, match="'a' is already loaded"):
        table.load("a")


def test_release_and_unpin_without_a_counterpart_are_refused() -> None:
    table = Table(1)
    ref = table.load("a")
    with pytest.raises(KeyError, match="no user"):
        table.release(ref)
    with pytest.raises(KeyError, match="no pin"):
        table.unpin(ref)
    with pytest.raises(KeyError, match="no slot"):
        table.pin(ref)
    with pytest.raises(KeyError, match="not loaded"):
        table.release(AdapterRef("a", 99))


def test_use_refreshes_recency_and_names_the_adapter_without_a_slot() -> None:
    table = Table(2)
    a, b, c = (table.load(name) for name in "abc")
    assert [table.put(ref) for ref in (a, b)] == [0, 1]
    assert table.use_slots([a, None, a]) == [0, None, 0]
    assert table.put(c) == 1
    assert table.slot_of(b) is None
    with pytest.raises(KeyError, match="name='b'"):
        table.use_slots([a, b])


def test_a_replacement_takes_over_the_name_and_the_pin_in_one_moment() -> None:
    table = Table(3)
    old = table.load("a", "old")
    table.wanted.pin("a")
    table.acquire("a")
    table.put(old)
    new = table.add("a", record("a"), "new", replace=True)
    assert table.acquire("a") == new
    assert table.wanted.is_pinned(new)
    assert not table.wanted.is_pinned(old)
    assert table.wanted.pinned_without_slot() == [new]
    table.check()
    table.release(old)
    assert table.slot_of(old) is None
    assert table.add("b", record("b"), "b", replace=True) == table.acquire("b")


def test_another_number_for_the_same_adapter_leaves_requests_in_progress_alone() -> None:
    table = Table(2)
    old = table.load("a")
    table.acquire("a")
    new = table.renumber("a", 40)
    assert (table.acquire("a"), new.generation) == (new, 40)
    assert table.tensors_of(new) == table.tensors_of(old) == "a"
    table.release(old)
    table.check()
    with pytest.raises(ValueError, match="generation 40"):
        table.renumber("a", 40)


# Slots being written


def test_a_slot_that_is_not_written_serves_nobody_and_is_kept() -> None:
    table = Table(1)
    a, b = table.load("a"), table.load("b")
    table.acquire("a")
    found = table.prepare(a)
    assert (found.readiness, found.slot, found.tensors) == (Readiness.WRITING, 0, "a")
    assert table.prepare(a).readiness is Readiness.WRITING
    assert table.whereabouts.residency()[0] == []
    with pytest.raises(KeyError, match="has no slot"):
        table.use_slots([a])
    with pytest.raises(KeyError, match="no slot"):
        table.pin(a)
    assert table.prepare(b).readiness is Readiness.NO_SLOT
    table.whereabouts.next_report()
    table.finish_write(a)
    assert table.whereabouts.next_report() is not None
    # Kept for the request it was written for, until that runs and is done.
    assert table.prepare(b).readiness is Readiness.NO_SLOT
    table.pin(a)
    assert table.prepare(b).readiness is Readiness.NO_SLOT
    table.unpin(a)
    assert table.prepare(b, take_slot=False).readiness is Readiness.SLOT_AVAILABLE
    assert table.prepare(b).slot == 0


def test_a_slot_is_kept_too_for_an_adapter_that_got_it_while_others_wait_to_be_read() -> None:
    table = Table(1, host_adapters=2)
    cold, warm, other = (table.load(name) for name in ("cold", "warm", "other"))
    for ref in (cold, warm, other):
        table.acquire(ref.name)
    assert table.prepare(cold).readiness is Readiness.READING
    assert table.prepare(warm).slot == 0
    table.finish_write(warm)
    assert table.prepare(other).readiness is Readiness.NO_SLOT
    table.check()
    table.pin(warm)


def test_a_written_slot_is_not_kept_for_requests_that_left() -> None:
    table = Table(1)
    a, b = table.load("a"), table.load("b")
    table.acquire("a")
    table.start(a)
    assert table.prepare(b).readiness is Readiness.NO_SLOT
    table.release(a)
    assert table.slot_of(a) == 0
    assert table.start(b) is Readiness.READY


def test_unloading_what_is_being_written_frees_the_slot() -> None:
    table = Table(1)
    a, b = table.load("a"), table.load("b")
    table.prepare(a)
    table.retire("a")
    table.check()
    table.finish_write(a)
    assert not table.is_writing(a)
    assert table.start(b) is Readiness.READY
    table.check()


# Host memory


def test_what_is_in_host_memory_is_told_with_every_change_and_not_with_every_use() -> None:
    table = Table(2, host_adapters=2)
    a, b, c = (table.load(name) for name in "abc")
    assert table.whereabouts.in_host_memory() == [b, c]
    table.whereabouts.next_report()
    for ref in (a, b, c, b):
        table.tensors_of(ref)
    assert table.whereabouts.next_report() is None
    assert table.whereabouts.in_host_memory() == [b, c]
    table.acquire("a")
    table.prepare(a)
    table.read(a)
    report = table.whereabouts.next_report()
    assert report is not None
    assert report.in_memory == [a, b]
    assert table.whereabouts.in_host_memory() == [a, b], "what was used before the others made room"
    table.acquire("b")
    table.retire("b")
    assert table.whereabouts.in_host_memory() == [a], "it admits no requests"


def test_tensors_beyond_the_budget_are_read_again_in_the_order_of_asking() -> None:
    table = Table(2, host_adapters=2)
    refs = [table.load(name) for name in "abcd"]
    assert [table.whereabouts.status(name).tier for name in "abcd"] == ["disk", "disk", "host", "host"]
    for ref in refs[:2]:
        table.acquire(ref.name)
        assert table.prepare(ref).readiness is Readiness.READING
    table.read(refs[0])
    table.read(refs[1])
    assert [table.whereabouts.status(name).tier for name in "abcd"] == ["host", "host", "disk", "disk"]
    assert [table.start(ref) for ref in refs[:2]] == [Readiness.READY] * 2
    table.check()


def test_what_is_on_its_way_to_a_slot_is_not_evicted_and_nothing_overtakes_what_waits_for_room() -> None:
    table = Table(1, host_adapters=1)
    table.load("busy")
    busy = table.acquire("busy")
    table.start(busy)
    table.pin(busy)
    a, b = table.load("a"), table.load("b")
    for ref in (a, b):
        table.acquire(ref.name)
        table.prepare(ref)
    table.read(a)
    assert table.prepare(a).readiness is Readiness.NO_SLOT
    assert table.prepare(b).readiness is Readiness.READING
    assert table.reads.next() is None
    table.unpin(busy)
    assert table.start(a) is Readiness.READY
    # In its slot it needs no copy.
    table.read(b)
    assert table.whereabouts.status("a").tier == "slot"
    table.check()


def test_adapters_in_memory_do_not_keep_a_larger_one_out_of_it() -> None:
    table = Table(1, host_adapters=2)
    large = table.add("large", record("large", 2 * SIZE), "large")
    busy, *small = (table.load(name) for name in ("busy", "a", "b"))
    table.put(busy)
    table.pin(busy)
    for ref in (large, *small):
        table.acquire(ref.name)
        table.prepare(ref)
    table.read(large)
    assert [table.whereabouts.status(name).tier for name in ("large", "a", "b")] == ["host", "disk", "disk"]
    table.check()


def test_few_adapters_are_read_ahead() -> None:
    table = Table(2, host_adapters=1)
    refs = [table.load(f"a{index}") for index in range(50)]
    for ref in refs[:-1]:
        table.acquire(ref.name)
        table.prepare(ref)
    table.check()
    served = []
    for _ in range(2 * len(refs)):
        if (job := table.reads.next()) is None:
            break
        table.reads.end(job[0], "")
        assert table.start(job[0]) is Readiness.READY
        table.pin(job[0])
        served.append(job[0])
        table.unpin(job[0])
        table.release(job[0])
    # Those that found no place ask again, as waiting requests do.
    assert served == refs[: 2 + READ_AHEAD]
    assert table.prepare(refs[20]).readiness is Readiness.READING
    table.read(refs[20])


def test_the_old_weights_of_requests_in_progress_are_evicted_last() -> None:
    table = Table(1, host_adapters=2)
    old = table.load("a", "old")
    table.acquire("a")
    table.add("a", record("a"), "new", replace=True)
    table.load("b")
    table.load("c")
    assert table.tensors_of(old) == "old"
    assert table.whereabouts.status("c").tier == "host"


def test_a_lost_adapter_is_told_once_and_then_tried_anew() -> None:
    table = Table(1, host_adapters=1)
    a, b = table.load("a"), table.load("b")
    table.acquire("a")
    table.prepare(a)
    job = table.reads.next()
    assert job is not None
    table.reads.fail(a, AdapterLost("gone"))
    assert table.whereabouts.status("b").tier == "disk"
    with pytest.raises(AdapterLost, match="gone"):
        table.prepare(a)
    assert table.prepare(a).readiness is Readiness.READING
    table.read(a)
    assert table.start(a) is Readiness.READY
    assert table.whereabouts.status("b").tier == "disk"
    assert table.prepare(b).readiness is Readiness.READING
    table.check()


def test_a_loss_is_not_told_to_requests_that_came_after_those_it_concerned() -> None:
    table = Table(1, host_adapters=1)
    a, _ = table.load("a"), table.load("b")
    table.acquire("a")
    table.prepare(a)
    table.reads.next()
    table.reads.fail(a, AdapterLost("gone"))
    table.release(a)
    table.acquire("a")
    assert table.prepare(a).readiness is Readiness.READING


def test_a_read_that_ends_after_its_adapter_was_unloaded_leaves_nothing() -> None:
    table = Table(1, host_adapters=1)
    a, b = table.load("a"), table.load("b")
    table.acquire("a")
    table.prepare(a)
    assert table.reads.next() is not None
    table.retire("a")
    table.release(a)
    table.check()
    table.reads.end(a, "late")
    table.check()
    assert table.prepare(b).readiness is Readiness.READING
    table.read(b)


# The operator's pins


def test_at_most_all_slots_but_one_are_pinned() -> None:
    table = Table(3)
    for name in "abc":
        table.load(name)
    assert [table.wanted.pin(name) for name in "aba"] == [True, True, False]
    with pytest.raises(PinRefused, match=r"2 adapter.* are pinned, and of 3 slot.*max_num_loras"):
        table.wanted.pin("c")
    with pytest.raises(AdapterNotFound):
        table.wanted.pin("absent")
    assert [table.wanted.unpin(name) for name in "aa"] == [True, False]
    assert table.wanted.pin("c")
    table.retire("c")
    assert table.wanted.pin("a")
    one = Table(1)
    one.load("a")
    with pytest.raises(PinRefused, match="of 1 slot"):
        one.wanted.pin("a")


def test_a_pinned_adapter_keeps_its_slot_with_nobody_using_it() -> None:
    table = Table(2)
    a, *others = (table.load(name) for name in "abcd")
    table.wanted.pin("a")
    assert table.wanted.pinned_without_slot() == [a]
    assert table.start(a) is Readiness.READY
    assert table.wanted.pinned_without_slot() == []
    for ref in others:
        table.put(ref)
        table.check()
    assert table.slot_of(a) == 0
    table.wanted.unpin("a")
    table.put(others[0])
    assert table.slot_of(a) is None


def test_a_pinned_adapter_whose_files_are_lost_is_tried_again_when_asked_for() -> None:
    table = Table(2, host_adapters=1)
    a, _ = table.load("a"), table.load("b")
    table.wanted.pin("a")
    table.prepare(a)
    table.reads.next()
    table.reads.fail(a, AdapterLost("gone"))
    assert table.wanted.pinned_without_slot() == []
    table.check()
    table.wanted.pin("a")
    assert table.wanted.pinned_without_slot() == [a]


def test_a_read_that_takes_too_long_keeps_no_memory_and_nobody_waiting() -> None:
    table = Table(1, host_adapters=1)
    stuck, other = table.load("stuck"), table.load("other")
    table.add("third", record("third"), "third")
    for ref in (stuck, other):
        table.acquire(ref.name)
        assert table.prepare(ref).readiness is Readiness.READING
    assert table.reads.next() is not None
    assert table.reads.next() is None, "there is room for one"
    table.reads.give_up(stuck, "it takes too long")
    for _ in range(2):
        with pytest.raises(AdapterLost, match="it takes too long"):
            table.prepare(stuck)
    table.read(other)
    table.check()
    # What comes late is kept if there is room: now there is none.
    table.reads.end(stuck, "stuck")
    table.check()
    assert table.start(other) is Readiness.READY
    assert table.prepare(stuck).readiness is Readiness.READING
    table.read(stuck)
    assert table.whereabouts.status("stuck").tier == "host"


def test_a_read_that_takes_long_lets_others_by_and_is_waited_for_all_the_same() -> None:
    table = Table(1, host_adapters=2)
    stuck = [table.load(f"stuck {index}") for index in range(1 + READ_AHEAD)]
    healthy = table.load("healthy")
    for name in ("in memory", "in memory, too"):
        table.load(name)
    for ref in (*stuck, healthy):
        table.acquire(ref.name)
        assert table.prepare(ref).readiness is Readiness.READING
    jobs = [table.reads.next(), table.reads.next()]
    assert [job and job[0] for job in jobs] == stuck[:2]
    assert table.reads.next() is None, "there is room for two"
    for _ in range(2):
        for ref in stuck[:2]:
            table.reads.step_aside(ref)
            assert table.prepare(ref).readiness is Readiness.READING
    # The place on the way, and the room, are free.
    assert table.prepare(healthy).is_new
    third = table.reads.next()
    assert third is not None
    assert third[0] == stuck[2]
    table.read(healthy)
    assert table.start(healthy) is Readiness.READY
    table.reads.end(stuck[0], "stuck 0")
    assert table.start(stuck[0]) is Readiness.NO_SLOT
    table.reads.fail(stuck[1], AdapterLost("gone after all"))
    with pytest.raises(AdapterLost, match="gone after all"):
        table.prepare(stuck[1])
    assert table.prepare(stuck[1]).readiness is Readiness.READING
    table.check()


def test_a_read_that_fails_is_nobodys_loss_where_the_adapter_came_from_elsewhere() -> None:
    table = Table(1, host_adapters=1)
    stuck = table.load("stuck")
    table.load("other")
    table.acquire("stuck")
    table.prepare(stuck)
    assert table.reads.next() is not None
    table.reads.step_aside(stuck)
    table.refresh(stuck, record("stuck"), "stuck")
    assert table.prepare(stuck, take_slot=False).readiness is Readiness.SLOT_AVAILABLE
    table.reads.fail(stuck, AdapterLost("gone"))
    table.check()
    assert table.start(stuck) is Readiness.READY


def test_a_pinned_adapter_whose_read_takes_too_long_is_tried_again_once_that_has_ended() -> None:
    table = Table(2, host_adapters=1)
    stuck = table.load("stuck")
    table.load("other")
    table.wanted.pin("stuck")
    table.prepare(stuck)
    assert table.reads.next() is not None
    table.reads.give_up(stuck, "it takes too long")
    assert table.wanted.pinned_without_slot() == []
    table.refresh(stuck, record("stuck"), None)
    assert table.wanted.pinned_without_slot() == []
    # Loaded again from where it can be read, it need not wait.
    table.refresh(stuck, record("stuck"), "stuck")
    assert table.wanted.pinned_without_slot() == [stuck]
    assert table.start(stuck) is Readiness.READY
    table.reads.end(stuck, "stuck")
    table.check()


class AdapterMachine(RuleBasedStateMachine):
    """Requests, loads, unloads, pins, reads and writes in random order, more names than slots or memory hold."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(2, host_adapters=2)
        self.num_loads = 0
        self.weights: dict[AdapterRef, str] = {}
        self.waiting: list[AdapterRef] = []
        self.running: list[AdapterRef] = []
        self.reading: list[AdapterRef] = []
        self.writing: list[AdapterRef] = []
        self.in_slot: dict[int, str] = {}
        self.protected: set[str] = set()
        self.residency = Residency(-1, [], [])

    @rule(name=st.sampled_from("abcd"), replace=st.booleans())
    def load(self, name: str, replace: bool) -> None:
        weights = f"{name}#{self.num_loads}"
        if self.table.find(name) is not None and not replace:
            with pytest.raises(AdapterNameTaken):
                self.table.load(name, weights)
            return
        ref = self.table.add(name, record(name), weights, replace=replace)
        assert ref not in self.weights, "a generation was reused"
        self.weights[ref] = weights
        self.num_loads += 1

    @rule(name=st.sampled_from("abcd"))
    def unload(self, name: str) -> None:
        if (found := self.table.find(name)) is None:
            with pytest.raises(AdapterNotFound):
                self.table.retire(name)
        else:
            assert self.table.retire(name) == (self.waiting + self.running).count(found[0])

    @rule(name=st.sampled_from("abcd"), on=st.booleans())
    def pin(self, name: str, on: bool) -> None:
        if self.table.find(name) is not None:
            if not on:
                self.table.wanted.unpin(name)
            elif any(status.pinned and status.name != name for status in self.table.whereabouts.statuses()):
                with pytest.raises(PinRefused):
                    self.table.wanted.pin(name)
            else:
                self.table.wanted.pin(name)

    @rule(name=st.sampled_from("abcd"))
    def warm_up(self, name: str) -> None:
        if (found := self.table.find(name)) is not None:
            readiness = self.table.wanted.warm_up(name)
            is_there = self.table.slot_of(found[0]) is not None
            assert (readiness is Readiness.READY) == is_there

    @rule()
    def assign_warm_up(self) -> None:
        kept = {ref for ref, _ in self.table.whereabouts.residents().values() if self.is_kept(ref)}
        found = self.table.wanted.assign_warm_up()
        if found is not None:
            ref, slot, tensors = found
            assert tensors == self.weights[ref]
            self.in_slot[slot] = "half"
            self.writing.append(ref)
        assert kept <= {ref for ref, _ in self.table.whereabouts.residents().values()}

    def is_kept(self, ref: AdapterRef) -> bool:
        """Whether a warm-up may not take its slot."""
        is_used = ref in self.waiting + self.running
        return is_used or ref.name in self.protected or self.table.wanted.is_pinned(ref)

    @rule(names=st.sets(st.sampled_from("abcd")))
    def protect(self, names: set[str]) -> None:
        self.table.wanted.protect(names)
        self.protected = names

    @rule(name=st.sampled_from("abcd"))
    def reset(self, name: str) -> None:
        found = self.table.find(name)
        self.table.reset(name)
        if found is not None and found[0] not in self.running:
            assert self.table.slot_of(found[0]) is None
            assert self.table.tensors_of(found[0]) is None

    @rule(name=st.sampled_from("abcd"))
    def admit(self, name: str) -> None:
        if self.table.find(name) is not None:
            self.waiting.append(self.table.acquire(name))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), take_slot=st.booleans())
    def prepare(self, data: st.DataObject, take_slot: bool) -> None:
        ref = data.draw(st.sampled_from(self.waiting))
        try:
            found = self.table.prepare(ref, take_slot=take_slot)
        except AdapterLost:
            while ref in self.waiting:
                self.cancel_one(ref)
            return
        if found.slot is not None:
            assert take_slot
            assert found.tensors == self.weights[ref]
            self.in_slot[found.slot] = "half"
            self.writing.append(ref)
        elif found.readiness is Readiness.READY:
            self.table.pin(ref)
            self.waiting.remove(ref)
            self.running.append(ref)
        elif found.readiness is Readiness.NO_SLOT:
            with pytest.raises(NoFreeSlot):
                self.table.assign(ref)

    @rule()
    def begin_read(self) -> None:
        job = self.table.reads.next()
        if job is not None:
            self.reading.append(job[0])

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), is_lost=st.booleans())
    def end_read(self, data: st.DataObject, is_lost: bool) -> None:
        ref = data.draw(st.sampled_from(self.reading))
        self.reading.remove(ref)
        if is_lost:
            self.table.reads.fail(ref, AdapterLost("gone"))
        else:
            self.table.reads.end(ref, self.weights[ref])

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def let_others_by_read(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.reading))
        self.table.reads.step_aside(ref)
        if ref in self.waiting and self.table.slot_of(ref) is None and self.table.tensors_of(ref) is None:
            assert self.table.reads.is_under_way(ref)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def give_up_read(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.reading))
        self.table.reads.give_up(ref, "it takes too long")
        if self.table.slot_of(ref) is None and self.table.tensors_of(ref) is None and self.table.num_users(ref):
            for _ in range(2):
                with pytest.raises(AdapterLost):
                    self.table.prepare(ref)

    @rule(name=st.sampled_from("abcd"), was_read=st.booleans())
    def refresh(self, name: str, was_read: bool) -> None:
        if (found := self.table.find(name)) is not None:
            self.table.refresh(*found, self.weights[found[0]] if was_read else None)

    @rule(name=st.sampled_from("abcd"))
    def renumber(self, name: str) -> None:
        if (found := self.table.find(name)) is not None:
            ref = self.table.renumber(name, 1000 + self.num_loads)
            self.weights[ref] = self.weights[found[0]]
            self.num_loads += 1

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def fail_write(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.writing))
        self.writing.remove(ref)
        self.table.abandon_write(ref)
        self.table.lose(ref, AdapterLost("does not fit"))

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def finish_write(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.writing))
        self.writing.remove(ref)
        self.table.finish_write(ref)
        if (slot := self.table.slot_of(ref)) is not None:
            self.in_slot[slot] = self.weights[ref]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), release_first=st.booleans())
    def finish(self, data: st.DataObject, release_first: bool) -> None:
        ref = data.draw(st.sampled_from(self.running))
        self.running.remove(ref)
        ends = [self.table.unpin, self.table.release]
        for end in reversed(ends) if release_first else ends:
            end(ref)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.cancel_one(data.draw(st.sampled_from(self.waiting)))

    def cancel_one(self, ref: AdapterRef) -> None:
        self.waiting.remove(ref)
        self.table.release(ref)

    @invariant()
    def holds(self) -> None:
        self.table.check()
        self.hear()
        for ref in self.running:
            slot = self.table.slot_of(ref)
            assert slot is not None
            assert self.in_slot[slot] == self.weights[ref]
        for ref in self.weights:
            assert self.table.tensors_of(ref) in (None, self.weights[ref])
            assert self.table.num_users(ref) == (self.waiting + self.running).count(ref)
            assert self.table.num_pins(ref) == self.running.count(ref)
        admitting = {ref for ref, _ in filter(None, map(self.table.find, "abcd"))}
        in_slots = {ref for ref, _ in self.table.whereabouts.residents().values()}
        assert in_slots <= admitting | {*self.waiting, *self.running}

    def hear(self) -> None:
        """Reports, one after another, say where everything is."""
        views = self.table.whereabouts
        report = views.next_report()
        if report is not None:
            assert report.sequence > self.residency.sequence
            full = report.over(self.residency)
            assert full is not None
            self.residency = full
        assert (self.residency.resident, self.residency.loaded) == views.residency()
        assert self.residency.in_memory == views.in_host_memory()
        assert self.residency.num_slots_used == len(views.residents())
        assert set(self.residency.loading).isdisjoint(self.residency.resident)


TestAdapterMachine = AdapterMachine.TestCase
TestAdapterMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
