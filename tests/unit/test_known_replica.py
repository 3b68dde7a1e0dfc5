"""What a handle knows of a replica: the table's row, its own replies, and the requests on their way there."""

import pytest

from cluster.fleet import ReplicaState
from deployments.generation import SlotSnapshot
from deployments.known_replica import KnownReplica


def row(*resident: str, sequence: int, loading: frozenset[str] = frozenset()) -> ReplicaState:
    names = frozenset(resident)
    return ReplicaState(
        resident=names, in_memory=frozenset("abc"), num_slots=4, num_slots_used=len(names), sequence=sequence,
        loading=loading,
    )  # fmt: skip


def told(*resident: str, sequence: int, loading: tuple[str, ...] = ()) -> SlotSnapshot:
    return SlotSnapshot(
        replica_id="r0", sequence=sequence, resident=resident, loading=loading, num_slots_used=len(resident) + 1
    )


def test_the_newest_word_on_slots_counts_wherever_it_comes_from() -> None:
    replica = KnownReplica()
    assert replica.take_row(row("a", sequence=5))
    assert not replica.take_snapshot(told("b", sequence=5)), "the same report in other words"
    assert replica.state.resident == {"a"}
    assert replica.take_snapshot(told("a", "b", sequence=7, loading=("c",)))
    assert not replica.take_snapshot(told("a", sequence=6))
    assert replica.state.resident == {"a", "b"}
    assert replica.state.loading == {"c"}
    assert replica.state.num_slots_used == 3
    assert replica.state.in_memory == set("abc"), "the table's alone to tell"
    assert replica.take_row(row("a", sequence=6))
    assert replica.state.resident == {"a", "b"}, "the table is late"
    assert replica.take_row(row("c", sequence=7))
    assert replica.state.resident == {"c"}
    assert replica.take_snapshot(told(sequence=8))
    assert replica.state.resident == frozenset()


def test_nothing_new_is_the_same_object() -> None:
    replica, known = KnownReplica(), row("a", sequence=1)
    replica.take_row(known)
    assert replica.state is known
    assert not replica.take_row(known)
    replica.take_snapshot(told("b", sequence=2))
    assert replica.state is replica.state


def test_requests_on_their_way_hint_at_a_load_until_it_is_seen_or_they_have_ended() -> None:
    replica = KnownReplica()
    replica.take_row(row("a", sequence=1, loading=frozenset("c")))
    assert not replica.claim("a"), "in a slot"
    assert not replica.claim("c"), "on its way by the replica's own word"
    assert replica.claim("b")
    assert not replica.claim("b"), "joins the load under way"
    assert replica.hints == {"b"}
    assert not replica.release("b")
    assert replica.hints == {"b"}
    replica.take_snapshot(told("a", "b", sequence=2))
    assert replica.hints == {"c"}
    replica.take_snapshot(told("a", "b", "c", sequence=3))
    assert replica.hints == frozenset()
    assert replica.release("b")
    replica.take_snapshot(told(sequence=4))
    assert replica.hints == {"a", "c"}, "requests that are there have their adapters brought back"


def test_a_request_that_ends_before_its_load_takes_its_hint_with_it() -> None:
    replica = KnownReplica()
    assert replica.claim("b")
    assert replica.release("b")
    assert replica.hints == frozenset()
    assert not replica.release("b"), "twice is once"
    assert replica.claim("b")


def test_busy_are_the_adapters_of_its_requests_and_those_that_replies_tell_of() -> None:
    replica = KnownReplica()
    for adapter in "aab":
        replica.claim(adapter)
    assert replica.num_busy == 2
    assert not replica.take_busy(2), "its own"
    assert replica.take_busy(5)
    assert replica.num_busy == 5
    replica.claim("c")
    replica.release("a")
    assert replica.num_busy == 6, "three are others'"
    replica.release("b")
    assert replica.take_busy(1), "less than its own: the reply is older"
    assert replica.num_busy == 2
    replica.take_busy(4)
    assert not replica.doubt_busy(), "just told"
    assert replica.num_busy == 4
    assert replica.doubt_busy(), "not told again since"
    assert replica.num_busy == 2
    assert not replica.doubt_busy()


def test_what_other_threads_read_is_made_where_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = KnownReplica()
    replica.take_row(row("a", sequence=5))
    replica.take_snapshot(told("b", sequence=6))
    # A reader that made it might put an older one in its place.
    monkeypatch.delattr(KnownReplica, "_merged")
    assert replica.state.resident == {"b"}
    assert replica.state is replica.state
