"""Routing policies that the simulator compares: ours, and what others do with what a handle knows."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from cluster.board import Board
from cluster.placement import PlacementSettings, cap_on
from cluster.rendezvous import hash_order

Choose = Callable[[Board, str, float, random.Random], str]
"""A board, an adapter's name and MiB, and a source of chance, to a replica's id."""


@dataclass(frozen=True)
class Policy:
    """A way to route, and what it needs of the fleet."""

    name: str
    choose: Choose
    reads_slots: bool = False
    """It asks who holds what; the others are not told."""
    has_plan: bool = False
    """A router actor plans copies, and replicas keep slots as it wishes."""
    has_all: bool = False
    """Every adapter is in a slot of every replica: what could be had without adapters."""


def ours(board: Board, adapter: str, mib: float, rng: random.Random) -> str:
    """`cluster.board`, which is `cluster.placement.rank`."""
    replica_id = board.first(adapter, mib=mib)
    assert replica_id is not None, "there are replicas"
    return replica_id


def any_replica(board: Board, adapter: str, mib: float, rng: random.Random) -> str:
    """Whichever, by chance."""
    return rng.choice(board.replica_ids)


class RoundRobin:
    """Each handle takes the replicas in turn, beginning anywhere."""

    def __init__(self) -> None:
        self._turns: dict[int, int] = {}

    def __call__(self, board: Board, adapter: str, mib: float, rng: random.Random) -> str:
        turn = self._turns.get(id(board), rng.randrange(1 << 20)) + 1
        self._turns[id(board)] = turn
        return board.replica_ids[turn % len(board.replica_ids)]


def power_of_two(board: Board, adapter: str, mib: float, rng: random.Random) -> str:
    """The less loaded of two replicas (Mitzenmacher 2001), which is Ray Serve's default."""
    return _shorter_of_two(board, board.replica_ids, rng)


def least_loaded(board: Board, adapter: str, mib: float, rng: random.Random) -> str:
    """The least loaded replica of all."""
    return _shortest(board, board.replica_ids, rng)


def rendezvous(board: Board, adapter: str, mib: float, rng: random.Random) -> str:
    """The first in rendezvous order (HRW), whatever its load."""
    return hash_order(adapter, board.replica_ids)[0]


def bounded_rendezvous(board: Board, adapter: str, mib: float, rng: random.Random) -> str:
    """The first in rendezvous order that is below 1.25 times the mean load."""
    total = sum(map(board.num_in_flight, board.replica_ids))
    cap = cap_on(total, len(board.replica_ids), PlacementSettings(load_cap=1.25, cap_slack=0.0))
    order = hash_order(adapter, board.replica_ids)
    return next((replica_id for replica_id in order if board.num_in_flight(replica_id) < cap), order[0])


def resident_first(board: Board, adapter: str, mib: float, rng: random.Random) -> str:
    """The least loaded replica that holds the adapter; the least loaded of all where none does."""
    return _shortest(board, board.holders(adapter) or board.replica_ids, rng)


def stock_multiplex(board: Board, adapter: str, mib: float, rng: random.Random) -> str:
    """Ray Serve's multiplexing: the shorter queue of two that hold the model, or of those with the fewest models."""
    candidates = board.holders(adapter)
    if not candidates:
        least = min(map(board.num_held, board.replica_ids))
        candidates = [replica_id for replica_id in board.replica_ids if board.num_held(replica_id) == least]
    return _shorter_of_two(board, candidates, rng)


def policies() -> list[Policy]:
    """All of them, ours first; new objects, since some remember."""
    return [
        Policy("ours", ours, reads_slots=True, has_plan=True),
        Policy("random", any_replica),
        Policy("round robin", RoundRobin()),
        Policy("power of two", power_of_two),
        Policy("least loaded", least_loaded),
        Policy("HRW", rendezvous),
        Policy("bounded HRW", bounded_rendezvous),
        Policy("resident first", resident_first, reads_slots=True),
        Policy("stock multiplex", stock_multiplex, reads_slots=True),
        Policy("all resident", least_loaded, has_all=True),
    ]


def _shortest(board: Board, replica_ids: list[str], rng: random.Random) -> str:
    least = min(map(board.num_in_flight, replica_ids))
    return rng.choice([replica_id for replica_id in replica_ids if board.num_in_flight(replica_id) == least])


def _shorter_of_two(board: Board, replica_ids: list[str], rng: random.Random) -> str:
    two = rng.sample(replica_ids, 2) if len(replica_ids) > 2 else replica_ids
    return _shortest(board, two, rng)
