"""The table's versions, and the deltas between them."""

import pickle

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.entry import AdapterEntry
from cluster.fleet import Alias, FleetTable, ReplicaState
from cluster.published_table import MAX_DELTAS_KEPT, PublishedTable
from cluster.table_changes import RowChange, applied

NAMES = st.sampled_from("abcdef")
NAME_SETS = st.frozensets(NAMES)


def entry(name: str, generation: int = 1) -> AdapterEntry:
    return AdapterEntry(name=name, path=f"/adapters/{name}", generation=generation, state="ready")


ROWS = st.builds(
    ReplicaState,
    resident=NAME_SETS,
    in_memory=NAME_SETS,
    refused=NAME_SETS,
    loading=NAME_SETS,
    stalled=NAME_SETS,
    num_slots=st.integers(0, 4),
    sequence=st.integers(-1, 3),
    load_ms_per_mib=st.dictionaries(st.sampled_from(["host", "disk"]), st.floats(0, 9)),
    service_ms=st.none() | st.floats(0, 9),
    is_stalled=st.booleans(),
)
CHANGES = st.fixed_dictionaries(
    {
        "adapters": st.dictionaries(NAMES, st.none() | st.builds(entry, NAMES, st.integers(1, 3))),
        "replicas": st.dictionaries(st.sampled_from(["r0", "r1", "r2"]), st.none() | ROWS),
        "copies": st.dictionaries(NAMES, st.none() | st.tuples(st.just("r0"), st.just("r1"))),
        "aliases": st.dictionaries(
            NAMES, st.none() | st.builds(Alias, name=NAMES, targets=st.just({"a": 1.0}), epoch=st.integers(1, 3))
        ),
    }
)


@settings(max_examples=25, deadline=None)
@given(steps=st.lists(CHANGES, max_size=8), read_at=st.sets(st.integers(0, 7)))
def test_a_reader_that_is_told_what_changed_has_what_is_published(
    steps: list[dict[str, dict[str, object]]], read_at: set[int]
) -> None:
    published = PublishedTable("router")
    expected: dict[str, dict[str, object]] = {"adapters": {}, "replicas": {}, "copies": {}, "aliases": {}}
    seen = published.table
    for position, step in enumerate(steps):
        before = published.table
        changed = published.update(position, **step)  # type: ignore[arg-type]
        assert changed == (published.table.version == before.version + 1)
        for field, values in step.items():
            expected[field].update(values)
            expected[field] = {name: value for name, value in expected[field].items() if value is not None}
        if position in read_at:
            news = pickle.loads(pickle.dumps(published.since(seen.version, "router")))
            assert isinstance(news, list)
            seen = applied(seen, news)
            assert seen == published.table
    for field, values in expected.items():
        assert getattr(published.table, field) == values


def test_what_does_not_change_is_the_same_object() -> None:
    published = PublishedTable("router")
    rows = {"r0": ReplicaState(resident=frozenset("a")), "r1": ReplicaState()}
    published.update(1, adapters={"a": entry("a"), "b": entry("b")}, replicas=rows)
    before = published.table
    published.update(2, replicas={"r0": ReplicaState(resident=frozenset("b")), "r1": ReplicaState()})
    after = published.table
    assert after.adapters is before.adapters
    assert after.copies is before.copies
    assert after.replicas["r1"] is before.replicas["r1"]
    news = published.since(before.version, "router")
    assert isinstance(news, list)
    (delta,) = news
    assert isinstance(delta.replicas["r0"], RowChange)
    assert delta.replicas.keys() == {"r0"}
    assert not published.update(3, adapters={"a": entry("a"), "gone": None}), "as it was"
    assert published.table is after


def test_whoever_is_too_far_behind_or_knows_another_router_is_told_everything() -> None:
    published = PublishedTable("router")
    first = published.table.version
    for generation in range(1, MAX_DELTAS_KEPT + 2):
        published.update(generation, adapters={"a": entry("a", generation)})
    last = published.table
    assert published.since(first, "router") is last
    assert published.since(last.version + 1, "router") is last
    assert published.since(last.version, "another") is last
    assert published.since(last.version, "router") == []
    deltas = published.since(first + 1, "router")
    assert isinstance(deltas, list)
    assert len(deltas) == MAX_DELTAS_KEPT


def fleet(num_adapters: int, num_replicas: int) -> PublishedTable:
    published = PublishedTable("router")
    names = [f"adapter-{number:06}" for number in range(num_adapters)]
    rows = {
        f"replica-{number:04}": ReplicaState(
            resident=frozenset(names[number * 7 % num_adapters :][:32]),
            in_memory=frozenset(names[number * 7 % num_adapters :][:200]),
            num_slots=32,
            num_slots_used=32,
        )
        for number in range(num_replicas)
    }
    published.update(1, adapters={name: entry(name) for name in names}, replicas=rows)
    return published


def delta_bytes(published: PublishedTable) -> int:
    """Size of the news that one adapter took the slot of another on one replica."""
    version, row = published.table.version, published.table.replicas["replica-0000"]
    gone = min(row.resident)
    resident = (row.resident - {gone}) | {"adapter-000999"}
    state = ReplicaState(resident=resident, in_memory=row.in_memory, num_slots=32, num_slots_used=32, sequence=5)
    published.update(2, replicas={"replica-0000": state})
    return len(pickle.dumps(published.since(version, "router")))


def test_news_cost_what_they_tell_and_not_what_there_is() -> None:
    small, large = fleet(1_000, 4), fleet(20_000, 100)
    assert delta_bytes(small) == delta_bytes(large) < 1000
    assert isinstance(large.since(0, "router"), FleetTable)
