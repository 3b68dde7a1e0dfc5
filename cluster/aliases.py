"""Aliases: names that stand for weighted adapters, as for a canary, and can be moved and moved back."""

import hashlib
import logging
import math
from collections.abc import Iterable, Mapping

from cluster.fleet import Alias, AliasInFleet
from cluster.journal import AliasRow, Journal
from cluster.names import listed, nearest
from lora_core.errors import AdapterNotFound, InvalidRequest

logger = logging.getLogger(__name__)

MAX_TARGETS = 16
"""Adapters that one alias may point to."""

MAX_WEIGHT = 1e9

MAX_MOVES_KEPT = 16
"""Moves of an alias that can be rolled back, one after the other."""


def choose(alias: Alias, key: str) -> str:
    """The adapter that a request for an alias gets.

    The same key gets the same adapter everywhere, as long as the alias is not moved; a move takes from each adapter
    only those requests by which its share falls (weighted rendezvous hashing: Schindelhauer and Schomaker 2005).

    Args:
        alias: The alias.
        key: What tells the request from others, such as its id.

    Returns:
        One of `alias.targets`, each with the probability of its share; never one whose share is 0.
    """
    weights = {target: share for target, share in alias.targets.items() if share > 0}
    return min(weights, key=lambda target: (_draw(target, key) / weights[target], target))


class AliasBook:
    """The aliases, and the journal that remembers them: every change is one epoch, and committed before it counts.

    Args:
        journal: Of the registry, which lends it out.
        known: Adapters that can be asked for, by name: a live view. Targets that are none of them at the start, as of
            a static adapter that the configuration no longer names, are dropped; so are aliases whose names the
            configuration now gives to adapters.
    """

    def __init__(self, journal: Journal, known: Mapping[str, object]) -> None:
        self._journal = journal
        self._known = known
        # By name, the oldest first.
        self._moves: dict[str, list[Alias]] = {}
        self.changed: set[str] = set()
        """Names of aliases that have changed; emptied by whoever reads it."""
        for row in journal.aliases():
            self._moves.setdefault(row.name, []).append(Alias(name=row.name, targets=row.targets, epoch=row.epoch))
            self.changed.add(row.name)
        self._drop_taken_names()
        self._drop_lost_targets()

    @property
    def epoch(self) -> int:
        """Of the last change of an alias that is still there."""
        return max((moves[-1].epoch for moves in self._moves.values()), default=0)

    @property
    def current(self) -> dict[str, Alias]:
        """All aliases by name."""
        return {name: moves[-1] for name, moves in self._moves.items()}

    def get(self, name: str) -> Alias | None:
        """The alias of a name; None where there is none."""
        moves = self._moves.get(name)
        return None if moves is None else moves[-1]

    def all(self) -> list[AliasInFleet]:
        """All aliases in the order of their names, each with where a rollback would lead."""
        return [AliasInFleet(alias=moves[-1], before=moves[-2::-1]) for _, moves in sorted(self._moves.items())]

    def pointing_to(self, adapter: str) -> list[str]:
        """Names of the aliases that have this adapter among their targets."""
        return sorted(name for name, moves in self._moves.items() if adapter in moves[-1].targets)

    def set(self, name: str, weights: Mapping[str, float], after: int) -> Alias:
        """Point an alias, new or known, at weighted adapters.

        Args:
            name: The alias; no adapter has this name.
            weights: Adapter -> weight, on any scale.
            after: The new epoch comes after this one.

        Returns:
            The alias as it is now; one that was just so already is not changed.

        Raises:
            InvalidRequest: there are no targets, too many, weights that cannot be, or targets that are not loaded.
        """
        targets = self._shares(name, weights)
        moves = self._moves.get(name, [])
        if moves and moves[-1].targets == targets:
            return moves[-1]
        with self._journal.transaction() as write:
            alias = Alias(name=name, targets=targets, epoch=write.next_epoch(after))
            kept = [*moves, alias][-1 - MAX_MOVES_KEPT :]
            write.put_alias(AliasRow(name, alias.epoch, targets))
            write.cut_alias(name, kept[0].epoch)
        self._moves[name] = kept
        self.changed.add(name)
        return alias

    def roll_back(self, name: str, after: int) -> Alias:
        """Point an alias at what it stood for before its last move; once more goes back one more.

        Raises:
            AdapterNotFound: no such alias.
            InvalidRequest: it has not been moved, or what it stood for is no longer loaded.
        """
        moves = self._known_moves(name)
        if len(moves) < 2:
            raise InvalidRequest(f"alias {name!r} cannot be rolled back: it has not been moved since it was made")
        before = moves[-2]
        try:
            self._check_targets(name, before.targets)
        except InvalidRequest as error:
            raise InvalidRequest(f"{error}; load it again, or set the alias anew") from None
        with self._journal.transaction() as write:
            alias = Alias(name=name, targets=before.targets, epoch=write.next_epoch(after))
            write.remove_alias(name, moves[-1].epoch)
            write.remove_alias(name, before.epoch)
            write.put_alias(AliasRow(name, alias.epoch, alias.targets))
        self._moves[name] = [*moves[:-2], alias]
        self.changed.add(name)
        return alias

    def remove(self, name: str, after: int) -> int:
        """Forget an alias; returns the epoch. Raises AdapterNotFound."""
        moves = self._known_moves(name)
        with self._journal.transaction() as write:
            epoch = write.next_epoch(after)
            for move in moves:
                write.remove_alias(name, move.epoch)
        del self._moves[name]
        self.changed.add(name)
        return epoch

    def _known_moves(self, name: str) -> list[Alias]:
        if name not in self._moves:
            raise AdapterNotFound(f"no alias named {name!r}; aliases: {listed(self._moves)}")
        return self._moves[name]

    def _shares(self, name: str, weights: Mapping[str, float]) -> dict[str, float]:
        """The weights as shares that sum to 1. Raises InvalidRequest."""
        if not 1 <= len(weights) <= MAX_TARGETS:
            raise InvalidRequest(f"alias {name!r} has {len(weights)} targets; expected 1 to {MAX_TARGETS}")
        for target, weight in weights.items():
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not (is_number and 0 <= weight <= MAX_WEIGHT):
                raise InvalidRequest(
                    f"alias {name!r}: the weight of {target!r} is {weight}; expected 0 to {MAX_WEIGHT:g}"
                )
        total = math.fsum(weights.values())
        if not total > 0:
            raise InvalidRequest(f"alias {name!r}: its {len(weights)} weight(s) sum to 0; expected more")
        self._check_targets(name, weights)
        return {target: weight / total for target, weight in sorted(weights.items())}

    def _check_targets(self, name: str, targets: Iterable[str]) -> None:
        for target in targets:
            if target not in self._known:
                raise InvalidRequest(
                    f"alias {name!r}: no adapter named {target!r} is loaded; {nearest(target, self._known)}"
                )

    def _drop_taken_names(self) -> None:
        for name in [name for name in self._moves if name in self._known]:
            logger.warning("alias %r is dropped: lora_paths gives its name to an adapter", name)
            self.remove(name, self._moves[name][-1].epoch)

    def _drop_lost_targets(self) -> None:
        """Take what is not there any more out of the aliases; one that is left with nothing goes."""
        for name, moves in list(self._moves.items()):
            last = moves[-1]
            left = {target: share for target, share in last.targets.items() if target in self._known}
            if left == last.targets:
                continue
            if sum(left.values()) > 0:
                self.set(name, left, last.epoch)
            else:
                self.remove(name, last.epoch)


def _draw(target: str, key: str) -> float:
    """Exponentially distributed over keys with mean 1, independent for each target."""
    digest = hashlib.blake2b(f"{len(target)}:{target}{key}".encode(errors="surrogatepass"), digest_size=8).digest()
    return -math.log((int.from_bytes(digest, "big") + 1) / (2**64 + 1))
