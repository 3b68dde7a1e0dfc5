"""Host memory: never more than its capacity, least recently used out first, claimed ones never."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lora_core.host_memory import HostMemory

Memory = HostMemory[str, str]


def filled(capacity: int, **sizes: int) -> Memory:
    memory = Memory(capacity)
    for key, size in sizes.items():
        assert memory.put(key, key.upper(), size)
    return memory


def test_the_least_recently_used_make_room() -> None:
    memory = filled(10, a=4, b=3, c=3)
    assert memory.get("a") == "A"
    assert memory.put("d", "D", 5)
    assert memory.keys() == ["a", "d"]
    assert memory.num_bytes == 9
    assert memory.get("b") is None


def test_claimed_entries_stay_and_nothing_is_evicted_in_vain() -> None:
    memory = filled(10, a=4, b=3, c=3)
    memory.claim("a")
    assert not memory.can_reserve(7)
    assert not memory.put("d", "D", 7)
    assert memory.keys() == ["a", "b", "c"]
    memory.release("a")
    assert memory.put("d", "D", 7)
    assert memory.keys() == ["c", "d"]


def test_room_is_set_aside_before_it_is_filled() -> None:
    memory = filled(10, a=4)
    assert memory.reserve("b", 6)
    assert memory.num_bytes == 10
    assert not memory.put("c", "C", 5)
    memory.cancel("b")
    assert memory.put("c", "C", 5)
    assert memory.reserve("d", 1)
    memory.fill("d", "D")
    assert memory.keys() == ["a", "c", "d"]
    memory.check()


def test_what_is_to_go_last_goes_last() -> None:
    memory = filled(10, a=4, b=3, c=3)
    assert memory.put("d", "D", 3, last={"a", "b"})
    assert memory.keys() == ["a", "b", "d"]
    assert memory.put("e", "E", 7, last={"a", "b"})
    assert memory.keys() == ["b", "e"]


def test_nothing_larger_than_the_capacity_fits() -> None:
    memory = filled(10, a=4)
    assert not memory.put("b", "B", 11)
    assert memory.keys() == ["a"]
    assert memory.put("c", "C", 10)
    assert memory.keys() == ["c"]


class MemoryMachine(RuleBasedStateMachine):
    """Random calls on a few keys; what was claimed or reserved must be there as long as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(12)
        self.reserved: set[str] = set()
        self.claimed: set[str] = set()

    @rule(key=st.sampled_from("abcdef"), size=st.integers(1, 13))
    def reserve(self, key: str, size: int) -> None:
        if key in self.memory or key in self.reserved:
            return
        can, before = self.memory.can_reserve(size), self.memory.keys()
        assert self.memory.reserve(key, size) == can
        if can:
            self.reserved.add(key)
        else:
            assert self.memory.keys() == before

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), is_filled=st.booleans())
    def end(self, data: st.DataObject, is_filled: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.reserved)))
        self.reserved.remove(key)
        if is_filled:
            self.memory.fill(key, key.upper())
            assert self.memory.keys()[-1] == key
        else:
            self.memory.cancel(key)

    @precondition(lambda self: len(self.memory) > 0)
    @rule(data=st.data(), claim=st.booleans())
    def claim(self, data: st.DataObject, claim: bool) -> None:
        key = data.draw(st.sampled_from(self.memory.keys()))
        if claim:
            self.memory.claim(key)
            self.claimed.add(key)
        else:
            self.memory.release(key)
            self.claimed.discard(key)

    @rule(key=st.sampled_from("abcdef"))
    def remove(self, key: str) -> None:
        self.memory.remove(key)
        assert key not in self.memory
        self.claimed.discard(key)

    @invariant()
    def holds(self) -> None:
        self.memory.check()
        assert self.claimed <= set(self.memory.keys())
        assert all(self.memory.is_claimed(key) == (key in self.claimed) for key in "abcdef")


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
