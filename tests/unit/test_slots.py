"""Slots: lowest free first, least recently used out, pinned ones never."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lora_core.slots import NoFreeSlot, _LoRALRUCache

Cache = _LoRALRUCache[str, int]


def filled(num_slots: int, *keys: str) -> Cache:
    cache = Cache(num_slots)
    for number, key in enumerate(keys):
        cache.put(key, number)
    return cache


def test_put_takes_the_lowest_free_slot() -> None:
    cache = filled(3, "a", "b", "c")
    assert [cache.get_slot(key) for key in "abc"] == [0, 1, 2]
    assert cache.next_slot() is None
    cache.remove("c")
    cache.remove("a")
    assert cache.next_slot() == 0
    assert cache.put("d", 4) == (None, 0)
    assert cache.put("e", 5) == (None, 2)


def test_put_evicts_the_least_recently_used() -> None:
    cache = filled(2, "a", "b")
    assert cache.get("a") == (0, 0)
    assert cache.put("c", 2) == ("b", 1)
    assert cache.keys() == ["a", "c"]


def test_get_slot_and_in_leave_recency_alone() -> None:
    cache = filled(2, "a", "b")
    assert cache.get_slot("a") == 0
    assert "a" in cache
    assert cache.put("c", 2) == ("a", 0)


def test_put_of_a_present_key_keeps_its_slot_and_makes_it_recent() -> None:
    cache = filled(2, "a", "b")
    assert cache.put("a", 7) == (None, 0)
    assert cache.get("a") == (7, 0)
    assert cache.put("c", 2) == ("b", 1)


def test_pinned_keys_are_passed_over_and_a_full_pinned_cache_refuses() -> None:
    cache = filled(2, "a", "b")
    cache.pin("a")
    assert cache.put("c", 2) == ("b", 1)
    cache.pin("c")
    assert cache.can_put("c")
    assert not cache.can_put("d")
    with pytest.raises(NoFreeSlot, match=r"all 2 adapter slots .* max_num_loras"):
        cache.put("d", 3)
    assert cache.keys() == ["a", "c"]


def test_protected_keys_go_last_and_spared_ones_never() -> None:
    cache = filled(3, "a", "b", "c")
    cache.protect(["a", "b", "absent"])
    assert cache.put("d", 4)[0] == "c", "not the least recently used, which is protected"
    cache.pin("d")
    assert cache.can_put("e")
    assert not cache.can_put("e", sparing=["a", "b"])
    with pytest.raises(NoFreeSlot):
        cache.put("e", 5, sparing=["a", "b"])
    assert cache.put("e", 5, sparing=["a"])[0] == "b"
    assert cache.put("f", 6)[0] == "e", "which is not protected, while a is"
    assert cache.put("g", 7)[0] == "f"
    cache.pin("g")
    assert cache.put("h", 8)[0] == "a", "where no other slot is left"
    cache.remove("h")
    assert cache.can_put("i", sparing=cache.keys()), "a free slot spares everybody"
    cache.check()


def test_pins_are_counted() -> None:
    cache = filled(1, "a")
    cache.pin("a")
    cache.pin("a")
    cache.unpin("a")
    assert cache.is_pinned("a")
    cache.unpin("a")
    assert not cache.is_pinned("a")
    with pytest.raises(KeyError):
        cache.unpin("a")
    with pytest.raises(KeyError):
        cache.pin("absent")


def test_pinned_keys_cannot_be_removed() -> None:
    cache = filled(2, "a", "b")
    cache.pin("a")
    with pytest.raises(ValueError, match="unpin"):
        cache.remove("a")
    with pytest.raises(ValueError, match="unpin"):
        cache.clear()
    assert cache.keys() == ["a", "b"]


def test_remove_clear_and_listings() -> None:
    cache = filled(2, "a", "b")
    assert cache.items() == [("a", (0, 0)), ("b", (1, 1))]
    assert cache.values() == [(0, 0), (1, 1)]
    assert cache.remove("a") == (True, 0)
    assert cache.remove("a") == (False, None)
    assert cache.get("a") == (None, None)
    cache.clear()
    assert len(cache) == 0
    assert cache.next_slot() == 0


def test_no_slots_at_all() -> None:
    cache = Cache(0)
    assert cache.next_slot() is None
    with pytest.raises(NoFreeSlot):
        cache.put("a", 0)
    with pytest.raises(ValueError, match="-1"):
        Cache(-1)


def test_version_rises_only_when_an_assignment_changes() -> None:
    cache = filled(1, "a")
    before = cache.version
    cache.get("a")
    cache.put("a", 1)
    cache.pin("a")
    with pytest.raises(NoFreeSlot):
        cache.put("b", 2)
    cache.unpin("a")
    cache.remove("absent")
    assert cache.version == before
    cache.put("b", 2)
    assert cache.version > before


KEYS = st.sampled_from("abcdef")


class SlotMachine(RuleBasedStateMachine):
    """Random calls, compared with a list in order of use and two dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(3)
        self.order: list[str] = []
        self.slots: dict[str, int] = {}
        self.pins: dict[str, int] = {}
        self.protected: set[str] = set()

    @rule(keys=st.sets(KEYS))
    def protect(self, keys: set[str]) -> None:
        self.cache.protect(keys)
        self.protected = keys

    @rule(key=KEYS, value=st.integers(0, 9), sparing=st.sets(KEYS))
    def put(self, key: str, value: int, sparing: set[str]) -> None:
        victim = None
        if key not in self.slots and len(self.slots) == 3:
            may_go = [other for other in self.order if not self.pins.get(other) and other not in sparing]
            assert self.cache.can_put(key, sparing=sparing) == bool(may_go)
            if not may_go:
                with pytest.raises(NoFreeSlot):
                    self.cache.put(key, value, sparing=sparing)
                return
            victim = min(may_go, key=lambda other: other in self.protected)
            self.forget(victim)
        if key not in self.slots:
            self.slots[key] = min({0, 1, 2} - set(self.slots.values()))
        self.use(key)
        assert self.cache.put(key, value, sparing=sparing) == (victim, self.slots[key])
        assert self.cache.get(key) == (value, self.slots[key])

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        _, slot = self.cache.get(key)
        assert slot == self.slots.get(key)
        if slot is not None:
            self.use(key)

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        if self.pins.get(key):
            with pytest.raises(ValueError, match="pinned"):
                self.cache.remove(key)
        else:
            assert self.cache.remove(key) == (key in self.slots, self.slots.get(key))
            self.forget(key)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.slots)))
        self.cache.pin(key)
        self.pins[key] = self.pins.get(key, 0) + 1

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(key for key, count in self.pins.items() if count)))
        self.cache.unpin(key)
        self.pins[key] -= 1

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        assert self.cache.keys() == self.order
        assert {key: slot for key, (_, slot) in self.cache.items()} == self.slots
        assert {key for key in self.order if self.cache.is_pinned(key)} == {k for k, n in self.pins.items() if n}
        can_put_more = len(self.slots) < 3 or any(not self.pins.get(key) for key in self.slots)
        assert self.cache.can_put("another") == can_put_more

    def use(self, key: str) -> None:
        if key in self.order:
            self.order.remove(key)
        self.order.append(key)

    def forget(self, key: str) -> None:
        if key in self.slots:
            self.order.remove(key)
            del self.slots[key]


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
