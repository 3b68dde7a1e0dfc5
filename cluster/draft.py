"""`Draft`: a plan in the making: who is where, and what that leaves of slots and of each replica's due."""

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from cluster.rendezvous import replica_hashes, weights

_HEAVY = 1 / 16
"""Part of a host's due that makes a piece heavy."""
_TRIED = 64
"""Adapters looked at for one to move from a replica that has too much."""
_MOST_MOVES = 4
"""Moves that balancing may take for each adapter and replica: it ends after far fewer."""
_NEGLIGIBLE = 1e-9
"""Of all work: what is not worth a move."""


@dataclass(frozen=True)
class Host:
    """A replica that adapters are to be placed on."""

    replica_id: str
    num_slots: int
    resident: AbstractSet[str] = frozenset()
    """Adapters in its slots now."""
    refused: AbstractSet[str] = frozenset()
    """Adapters it cannot serve."""
    speed: float = 1.0
    """How much work is its due, against the others."""


class Draft:
    """Adapters on hosts, each with promised slots on some, or at a home without a promise.

    Args:
        hosts: Sorted by id.
        shares: Each adapter's share of all work.
        firsts: First host in rendezvous order of each adapter to place.
        num_pinned: Slots of every host that are not there to give.
        reserve: Part of a host's slots that is promised to nobody.
        tolerance: Part of its due that a host may have too much.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        shares: Mapping[str, float],
        firsts: Mapping[str, str],
        num_pinned: int,
        reserve: float,
        tolerance: float,
    ) -> None:
        self._hosts, self._shares, self._firsts = hosts, shares, firsts
        self._ids = [host.replica_id for host in hosts]
        self._index = {replica_id: index for index, replica_id in enumerate(self._ids)}
        self._hashes = replica_hashes(self._ids)
        free = [max(0, host.num_slots - num_pinned) for host in hosts]
        self.num_slots = sum(free)
        """Of all hosts, less those that are pinned."""
        self._room = np.array([min(slots, max(1, math.floor(slots * (1 - reserve)))) for slots in free])
        self.num_rooms = int(self._room.sum())
        """Slots that can be promised."""
        speed = np.array([host.speed for host in hosts], dtype=np.float64)
        self._due = math.fsum(shares.values()) * speed / speed.sum()
        self._most = self._due * (1 + tolerance)
        self._load = np.zeros(len(hosts))
        self._slots: dict[str, list[int]] = {}
        self._homes: dict[str, int] = {}
        self._left: float = math.inf
        self._are_short = len(shares) > self.num_slots

    # In this order

    def keep(self, name: str, replica_ids: Iterable[str], number: int) -> None:
        """Renew the promises of at most `number` of these replicas, those that are still there and have room."""
        found = [self._index[replica_id] for replica_id in replica_ids if replica_id in self._index]
        kept = [index for index in found if self._room[index] > 0 and self._can_serve(name, index)][:number]
        if kept:
            self._room[kept] -= 1
            self._slots[name] = kept
            self._load[kept] += self._share(name) / len(kept)

    def settle(self, homes: Mapping[str, str]) -> None:
        """Give every adapter without a promise a home: the one it had, or else its first in rendezvous order."""
        for name, first in self._firsts.items():
            if name not in self._slots:
                home = self._index.get(homes.get(name, first), self._index[first])
                if not self._can_serve(name, home):
                    home = self._next_home(name)
                self._homes[name] = home
                self._load[home] += self._share(name)

    def grant(self, numbers: Mapping[str, int], budget: float | None) -> None:
        """Promise each of these adapters as many slots as it should have, the first named first.

        Args:
            numbers: Slots by adapter.
            budget: Most new promises, and homes moved by `balance`; one where the adapter is in a slot costs nothing.
        """
        self._left = math.inf if budget is None else budget
        for name, number in numbers.items():
            while len(self._slots.get(name, ())) < number:
                index = self._best_host(name, number)
                if index is None or not self._spend(name, index):
                    break
                self._add_slot(name, index)

    def balance(self) -> None:
        """Move homes and promises from hosts with too much to that with least, until all have their due or nearly."""
        lists, stuck = self._movable(), np.zeros(len(self._ids), dtype=bool)
        num_heavy = 2 * len(self._ids)
        # Each move helps, but for roundings, in which moves of next to nothing could go to and fro for ever.
        for _ in range(_MOST_MOVES * (len(self._firsts) + len(self._slots) + len(self._ids))):
            over = np.where(stuck, -np.inf, self._load - self._most)
            source = int(over.argmax())
            if over[source] <= _NEGLIGIBLE or self._left < 1:
                break
            move = self._next_move(lists[source], source)
            if move is None and num_heavy > 0:
                move, num_heavy = self._next_heavy_move(lists, source), num_heavy - 1
                if move is not None:
                    stuck[:] = False
            if move is None:
                stuck[source] = True
                continue
            piece, name, target = move
            lists[source].remove((piece, name))
            bisect.insort(lists[target], (piece, name))
            self._move(name, source, target)
        self._return_home()

    # The outcome

    def slots(self) -> dict[str, tuple[str, ...]]:
        """Replicas that promise each adapter a slot."""
        return {name: tuple(self._ids[index] for index in where) for name, where in self._slots.items()}

    def homes(self) -> dict[str, str]:
        """Replica of each adapter without a promise, where it is not its first."""
        found = {name: self._ids[index] for name, index in self._homes.items()}
        return {name: home for name, home in found.items() if home != self._firsts[name]}

    def keep_lists(self) -> dict[str, tuple[str, ...]]:
        """Adapters that each replica promises a slot, most work per copy first."""
        lists: list[list[tuple[float, str]]] = [[] for _ in self._ids]
        for name, where in self._slots.items():
            for index in where:
                lists[index].append((-self._share(name) / len(where), name))
        return {self._ids[index]: tuple(name for _, name in sorted(found)) for index, found in enumerate(lists)}

    # Inside

    def _share(self, name: str) -> float:
        return self._shares.get(name, 0.0)

    def _can_serve(self, name: str, index: int) -> bool:
        return name not in self._hosts[index].refused

    def _next_home(self, name: str) -> int:
        """First host in rendezvous order that can serve it; the very first where none can."""
        order: list[int] = np.argsort(~weights(name, self._hashes), kind="stable").tolist()
        return next((index for index in order if self._can_serve(name, index)), order[0])

    def _best_host(self, name: str, number: int) -> int | None:
        """Where the adapter's next slot should be: at its home, where it is in a slot, or next in rendezvous order.

        A host that the adapter would give too much work is only taken where all others would have too much, too.
        """
        where = self._slots.get(name, [])
        usable = self._room > 0
        usable[where] = False
        usable &= np.fromiter((name not in host.refused for host in self._hosts), bool, len(self._hosts))
        if not usable.any():
            return None
        home = self._homes.get(name)
        if home is not None and usable[home]:
            return home
        if home is not None and number == 1 and self._can_serve(name, home) and self._are_short:
            # Its requests keep it in a slot there, too, if it is popular: no reason to move it while others lack one.
            return None
        within = usable & (self._load + self._share(name) / number <= self._most)
        if not within.any():
            return int(np.where(usable, self._load - self._due, np.inf).argmin())
        there = [index for index in np.flatnonzero(within).tolist() if name in self._hosts[index].resident]
        if there:
            within = np.isin(np.arange(len(self._ids)), there)
        return int(np.argmax(np.where(within, weights(name, self._hashes) >> np.uint64(1), np.uint64(0))))

    def _spend(self, name: str, index: int) -> bool:
        """Take one change from the budget, where it is one."""
        if name in self._hosts[index].resident:
            return True
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def _add_slot(self, name: str, index: int) -> None:
        share = self._share(name)
        home = self._homes.pop(name, None)
        if home is not None:
            self._load[home] -= share
        where = self._slots.setdefault(name, [])
        if where:
            self._load[where] -= share / len(where)
        where.append(index)
        self._load[where] += share / len(where)
        self._room[index] -= 1

    def _piece(self, name: str) -> float:
        """What an adapter gives each of its hosts to do."""
        return self._share(name) / len(self._slots.get(name, (0,)))

    def _movable(self) -> list[list[tuple[float, str]]]:
        """For each host what each of its adapters gives it to do, in rising order."""
        lists: list[list[tuple[float, str]]] = [[] for _ in self._ids]
        for name, index in self._homes.items():
            lists[index].append((self._share(name), name))
        for name, where in self._slots.items():
            for index in where:
                lists[index].append((self._piece(name), name))
        for found in lists:
            found.sort()
        return lists

    def _next_move(self, found: list[tuple[float, str]], source: int) -> tuple[float, str, int] | None:
        """What to move next from a host, and where to; None where no move helps.

        The largest piece that leaves the source its due, and gives the target no more than that; or else the smallest
        larger one, after which others can move back. With each move the squares of excesses and lacks sum to less.
        """
        target = int((self._load - self._due).argmin())
        excess, room = self._load[source] - self._due[source], self._most[target] - self._load[target]
        lack = self._due[target] - self._load[target]
        end = bisect.bisect_right(found, (min(excess, room), "\U0010ffff"))
        for position in (*range(end - 1, max(-1, end - 1 - _TRIED), -1), *range(end, min(len(found), end + _TRIED))):
            piece, name = found[position]
            if 0 < piece < excess + lack and self._can_move(name, target):
                return piece, name, target
        return None

    def _next_heavy_move(self, lists: list[list[tuple[float, str]]], source: int) -> tuple[float, str, int] | None:
        """What to move from a host that has heavy pieces only, to one that has little but light ones to give away."""
        cuts = [bisect.bisect_left(found, (_HEAVY * due, "")) for found, due in zip(lists, self._due, strict=True)]
        heavy = np.array([sum(piece for piece, _ in found[cut:]) for found, cut in zip(lists, cuts, strict=True)])
        for piece, name in lists[source][cuts[source] :]:
            usable = [index for index in range(len(lists)) if index != source and self._can_move(name, index)]
            target = min(usable, key=lambda index: (heavy[index] - self._due[index], index), default=source)
            if heavy[target] + piece < min(heavy[source], self._most[target]):
                return piece, name, target
        return None

    def _can_move(self, name: str, target: int) -> bool:
        where = self._slots.get(name, ())
        has_room = len(where) < 2 or (self._room[target] > 0 and target not in where)
        return bool(has_room) and self._can_serve(name, target)

    def _move(self, name: str, source: int, target: int) -> None:
        piece = self._piece(name)
        self._left -= 1
        self._load[source] -= piece
        self._load[target] += piece
        if name in self._slots and self._room[target] == 0:
            # It goes without a promise: the other adapters there have them all.
            del self._slots[name]
            self._room[source] += 1
            self._homes[name] = target
        elif name in self._slots:
            self._slots[name] = [target if index == source else index for index in self._slots[name]]
            self._room[source] += 1
            self._room[target] -= 1
        else:
            self._homes[name] = target

    def _return_home(self) -> None:
        """Let adapters without a promise back to their first replica where that has less than its due without them."""
        for name in sorted(self.homes()):
            first, home = self._index[self._firsts[name]], self._homes[name]
            fits = self._load[first] + self._share(name) <= self._due[first]
            if fits and self._left >= 1 and self._can_serve(name, first):
                self._move(name, home, first)
