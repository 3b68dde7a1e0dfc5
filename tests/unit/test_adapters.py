"""The table of loaded adapters: names, generations, users, and the slots they hold."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lora_core.adapters import Activation, AdapterTable
from lora_core.errors import AdapterNameTaken, AdapterNotFound
from lora_core.slots import NoFreeSlot
from lora_core.types import AdapterRef

Table = AdapterTable[str]


def test_a_retired_adapter_lives_until_its_last_release() -> None:
    table = Table(2)
    table.add("a", "old weights")
    first, second = table.acquire("a"), table.acquire("a")
    assert first == second
    table.activate(first)
    assert table.retire("a") == 2
    with pytest.raises(AdapterNotFound):
        table.acquire("a")
    assert table.activate(first).model == "old weights"
    table.release(first)
    assert table.slot_of(first) == 0
    table.release(second)
    assert table.slot_of(first) is None
    with pytest.raises(KeyError, match="not loaded"):
        table.activate(first)


def test_a_name_loaded_again_is_another_adapter() -> None:
    table = Table(2)
    old = table.add("a", "old weights")
    table.acquire("a")
    table.activate("a")
    table.retire("a")
    new = table.add("a", "new weights")
    assert new.generation != old.generation
    assert table.activate("a").slot == 1
    assert table.activate(old).model == "old weights"
    assert table.acquire("a") == new
    assert table.residency() == ([new], [new])
    table.release(old)
    assert table.residents() == {1: (new, "new weights")}


def test_an_unused_adapter_is_dropped_at_once() -> None:
    table = Table(1)
    ref = table.add("a", "weights")
    table.activate("a")
    assert table.retire("a") == 0
    assert table.slot_of(ref) is None
    assert table.models() == {}
    with pytest.raises(AdapterNotFound, match="loaded adapters: none"):
        table.retire("a")


def test_a_pinned_slot_outlives_the_last_release() -> None:
    table = Table(1)
    table.add("a", "weights")
    ref = table.acquire("a")
    table.activate(ref)
    table.pin(ref)
    table.retire("a")
    table.release(ref)
    assert table.slot_of(ref) == 0
    table.unpin(ref)
    assert table.slot_of(ref) is None


def test_generations_are_the_callers_or_fresh_and_never_reused() -> None:
    table = Table(1)
    assert table.add("a", "", generation=7) == AdapterRef("a", 7)
    assert table.add("b", "") == AdapterRef("b", 8)
    table.retire("a")
    with pytest.raises(ValueError, match="generation 7 was given"):
        table.add("c", "", generation=7)
    assert table.add("a", "", generation=3) == AdapterRef("a", 3)
    assert table.add("d", "") == AdapterRef("d", 9)
    with pytest.raises(AdapterNameTaken, match="'a' is already loaded"):
        table.add("a", "")


def test_release_without_a_user_is_refused() -> None:
    table = Table(1)
    ref = table.add("a", "")
    with pytest.raises(KeyError, match="no user"):
        table.release(ref)
    with pytest.raises(KeyError, match="not loaded"):
        table.release(AdapterRef("a", 99))


def test_activation_is_new_once_and_refreshes_recency() -> None:
    table = Table(2)
    a, b, c = (table.add(name, name) for name in "abc")
    assert table.activate(a).is_new
    assert table.activate(b).is_new
    assert not table.activate(a).is_new
    assert table.activate(c) == Activation(c, "c", 1, True)
    assert table.slot_of(b) is None


def test_use_slots_refreshes_recency_and_names_the_adapter_without_a_slot() -> None:
    table = Table(2)
    a, b, c = (table.add(name, name) for name in "abc")
    table.activate(a)
    table.activate(b)
    assert table.use_slots([a, None, a]) == [0, None, 0]
    table.activate(c)
    assert table.slot_of(a) == 0
    with pytest.raises(KeyError, match="name='b'"):
        table.use_slots([a, b])


class AdapterMachine(RuleBasedStateMachine):
    """Requests, loads and unloads in random order over more names than slots."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(2)
        self.num_loads = 0
        self.weights: dict[AdapterRef, str] = {}
        self.waiting: list[AdapterRef] = []
        self.running: list[AdapterRef] = []

    @rule(name=st.sampled_from("abcd"))
    def load(self, name: str) -> None:
        weights = f"{name}#{self.num_loads}"
        if self.table.find(name) is not None:
            with pytest.raises(AdapterNameTaken):
                self.table.add(name, weights)
            return
        ref = self.table.add(name, weights)
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

    @rule(name=st.sampled_from("abcd"))
    def admit(self, name: str) -> None:
        if self.table.find(name) is not None:
            self.waiting.append(self.table.acquire(name))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.waiting))
        pinned_elsewhere = set(self.running) - {ref}
        assert self.table.can_activate(ref) == (len(pinned_elsewhere) < 2)
        if len(pinned_elsewhere) == 2:
            with pytest.raises(NoFreeSlot):
                self.table.activate(ref)
            return
        assert self.table.activate(ref).model == self.weights[ref]
        self.table.pin(ref)
        self.waiting.remove(ref)
        self.running.append(ref)

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
        ref = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(ref)
        self.table.release(ref)

    @invariant()
    def holds(self) -> None:
        self.table.check()
        assert all(self.table.slot_of(ref) is not None for ref in self.running)
        found = dict(self.table.residents().values())
        assert found == {ref: self.weights[ref] for ref in found}
        admitting = {ref for ref, _ in filter(None, map(self.table.find, "abcd"))}
        assert found.keys() <= admitting | {*self.waiting, *self.running}


TestAdapterMachine = AdapterMachine.TestCase
TestAdapterMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
