"""`Board` comes to the order of `cluster.placement.rank`, through any news in any order."""

import math

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.board import Board
from cluster.fleet import ReplicaState
from cluster.placement import TERMS, PlacementSettings, rank
from cluster.progress import BASE
from cluster.rendezvous import hash_order

IDS = [f"r{i}" for i in range(6)]
ADAPTERS = list("abcd")
NAMES = st.frozensets(st.sampled_from(ADAPTERS))
# Quarters add up to the same sum in any order.
QUARTERS = st.integers(0, 40).map(lambda n: n / 4)
RATES = st.dictionaries(st.sampled_from(["host", "disk"]), QUARTERS)


@st.composite
def states(draw: st.DrawFn) -> ReplicaState:
    """What a replica may report."""
    resident = draw(NAMES)
    return ReplicaState(
        resident=resident,
        in_memory=draw(NAMES),
        refused=draw(st.sampled_from([frozenset(), frozenset("a"), frozenset("bc")])),
        stalled=draw(st.sampled_from([frozenset(), frozenset("d"), frozenset([BASE])])),
        is_stalled=draw(st.integers(0, 9)) == 0,
        loading=draw(NAMES),
        num_slots=draw(st.integers(0, 4)),
        num_slots_used=draw(st.integers(0, 4)),
        service_ms=draw(st.none() | QUARTERS),
        load_ms_per_mib=draw(RATES),
        sequence=1,
    )


SETTINGS = st.builds(
    PlacementSettings,
    load_cap=st.sampled_from([0.0, 1.0, 1.25]),
    cap_slack=st.sampled_from([0.0, 2.0]),
    stray_ms=st.sampled_from([0.0, 12.5, 10_000.0]),
    without=st.lists(st.sampled_from(TERMS), max_size=3),
)
NEWS = st.lists(
    st.one_of(
        st.tuples(st.just("state"), st.sampled_from(IDS), states()),
        st.tuples(st.just("flight"), st.sampled_from(IDS), st.integers(0, 12)),
        st.tuples(st.just("hints"), st.sampled_from(IDS), NAMES),
        st.tuples(st.just("busy"), st.sampled_from(IDS), st.integers(0, 9)),
        st.tuples(st.just("hold"), QUARTERS, st.none()),
        st.tuples(st.just("replicas"), st.dictionaries(st.sampled_from(IDS), st.integers(1, 12)), st.none()),
    ),
    max_size=25,
)
COPIES = st.dictionaries(
    st.sampled_from(ADAPTERS), st.lists(st.sampled_from([*IDS, "gone"]), min_size=1, unique=True).map(tuple)
)


def told(board: Board, news: list[tuple[str, object, object]]) -> Board:
    calls = {"state": board.set_state, "flight": board.set_in_flight, "hints": board.set_hints, "busy": board.set_busy}
    for kind, subject, value in news:
        if kind == "replicas":
            board.set_replicas(subject)  # type: ignore[arg-type]
        elif kind == "hold":
            board.set_hold_ms(subject)  # type: ignore[arg-type]
        else:
            calls[kind](subject, value)  # type: ignore[operator]
    return board


@settings(max_examples=300, deadline=None)
@given(
    policy=SETTINGS, news=NEWS, copies=COPIES, adapter=st.sampled_from([None, *ADAPTERS]),
    mib=st.sampled_from([0.0, 8.0]), prefix=st.dictionaries(st.sampled_from(IDS), QUARTERS, max_size=2),
)  # fmt: skip
def test_the_order_is_that_of_rank(
    policy: PlacementSettings,
    news: list[tuple[str, object, object]],
    copies: dict[str, tuple[str, ...]],
    adapter: str | None,
    mib: float,
    prefix: dict[str, float],
) -> None:
    board = Board(policy)
    board.set_replicas(dict.fromkeys(IDS[:4], 9))
    told(board, news).set_copies(copies)
    views = {replica_id: board.view(replica_id) for replica_id in board.replica_ids}
    granted = copies.get(adapter or "", ())
    order = rank(adapter, list(views.values()), policy, mib=mib, granted=granted, prefix_ms=prefix)
    usable = [name for name in order if not views[name].cannot_serve(adapter)] or order
    found = board.order(adapter, mib=mib, limit=99, prefix_ms=prefix)
    is_full = {name: view.in_flight >= view.capacity for name, view in views.items()}
    assert found.open == [name for name in usable if not is_full[name]]
    assert found.full == [name for name in usable if is_full[name]]
    assert board.first(adapter, mib=mib, prefix_ms=prefix) == next(iter(usable), None)
    assert board.order(adapter, mib=mib, limit=2, prefix_ms=prefix).open == found.open[:2]


@settings(max_examples=100, deadline=None)
@given(news=NEWS)
def test_what_it_keeps_of_the_past_does_not_matter(news: list[tuple[str, object, object]]) -> None:
    policy = PlacementSettings()
    board = Board(policy)
    board.set_replicas(dict.fromkeys(IDS, 9))
    told(board, news)
    fresh = Board(policy)
    fresh.set_replicas({name: board.view(name).capacity for name in board.replica_ids})
    for name in board.replica_ids:
        view = board.view(name)
        state = ReplicaState(**{
            field: getattr(view, field)
            for field in ("resident", "in_memory", "refused", "loading", "num_slots", "num_slots_used", "service_ms")
        })  # fmt: skip
        state = msgspec.structs.replace(state, is_stalled=view.is_stalled, load_ms_per_mib=view.load_ms_per_mib)
        fresh.set_state(name, state)
        fresh.set_in_flight(name, view.in_flight)
        fresh.set_busy(name, view.num_busy)
        assert view.hold_ms is not None
        fresh.set_hold_ms(view.hold_ms)
    for adapter in (None, *ADAPTERS):
        assert board.order(adapter, mib=4.0) == fresh.order(adapter, mib=4.0)


def test_without_news_every_handle_agrees_by_the_adapters_name() -> None:
    board = Board(PlacementSettings())
    assert board.first("a") is None
    assert board.order("a") == ([], [])
    board.set_replicas(dict.fromkeys(reversed(IDS), 1))
    assert board.order("a", limit=99).open == hash_order("a", IDS)


def test_holders_are_those_with_a_slot_and_those_on_the_way_to_one() -> None:
    board = Board(PlacementSettings())
    board.set_replicas(dict.fromkeys(IDS, 9))
    board.set_state("r0", ReplicaState(resident=frozenset("ab"), num_slots=2, num_slots_used=2))
    board.set_state("r1", ReplicaState(loading=frozenset("a")))
    board.set_hints("r2", frozenset("a"))
    assert board.holders("a") == ["r0", "r1", "r2"]
    assert board.holds("a", "r2")
    assert not board.holds("b", "r2")
    assert [board.num_held(name) for name in ("r0", "r2", "r3")] == [2, 1, 0]
    board.set_hints("r2", frozenset())
    board.set_replicas({"r1": 9, "r2": 9})
    assert board.holders("a") == ["r1"]
    board.set_in_flight("r0", 5)
    assert board.num_in_flight("r0") == 0, "it is gone"


def test_terms_are_those_of_the_score() -> None:
    board = Board(PlacementSettings(wait_ms=2.0))
    board.set_replicas(dict.fromkeys(IDS, 9))
    board.set_in_flight("r3", 4)
    board.set_copies({"a": ("r1",)})
    assert board.terms("a", "r3")[:1] == (8.0,)
    assert [board.terms("a", name).stray_ms > 0 for name in ("r1", "r3")] == [False, True]
    assert board.terms(None, "r3").cost(True) == 8.0
    assert math.isfinite(board.terms("a", "r1").load_ms)
