"""What differs between two versions of the fleet's table: all that a handle is told that has the first."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from cluster.entry import AdapterEntry
from cluster.fleet import Alias, FleetTable, ReplicaState
from lora_core.portable import portable

Value = TypeVar("Value")

NAME_SETS = ("resident", "in_memory", "refused", "loading", "stalled")
"""Fields of `ReplicaState` that are sets of names, of which any may be long."""

FIGURES = tuple(name for name in ReplicaState.__struct_fields__ if name not in NAME_SETS)


class NamesChange(NamedTuple):
    """How a set of names differs from what it was."""

    added: tuple[str, ...]
    removed: tuple[str, ...]


@portable
class RowChange(msgspec.Struct, frozen=True):
    """How a replica's row differs from what it was."""

    names: dict[str, NamesChange]
    """Field -> change, for the sets of names that changed."""
    figures: dict[str, object]
    """Field -> new value, for the other fields that changed."""


@portable
class TableDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What leads from one version of a table to the next. None stands for what is gone."""

    version: int
    """The version it leads to, from the one before."""
    epoch: int
    adapters: dict[str, AdapterEntry | None] = {}
    replicas: dict[str, ReplicaState | RowChange | None] = {}
    """A row that is new comes whole."""
    copies: dict[str, tuple[str, ...] | None] = {}
    aliases: dict[str, Alias | None] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs that a handle would route by."""
        return not (self.adapters or self.replicas or self.copies or self.aliases)


def row_change(old: ReplicaState, new: ReplicaState) -> RowChange:
    """How `new` differs from `old`."""
    names = {}
    for field in NAME_SETS:
        before, after = getattr(old, field), getattr(new, field)
        if before is not after and before != after:
            names[field] = NamesChange(tuple(after - before), tuple(before - after))
    figures = {field: getattr(new, field) for field in FIGURES if getattr(old, field) != getattr(new, field)}
    return RowChange(names, figures)


def changed_row(old: ReplicaState, change: RowChange) -> ReplicaState:
    """The row that `change` leads to from `old`, but for fields that this version of the project does not have."""
    sets = {
        field: getattr(old, field).difference(names.removed).union(names.added)
        for field, names in change.names.items()
        if field in NAME_SETS
    }
    figures = {field: value for field, value in change.figures.items() if field in FIGURES}
    return msgspec.structs.replace(old, **sets, **figures)


def differences(old: Mapping[str, Value], new: Mapping[str, Value | None]) -> dict[str, Value | None]:
    """Those of the `new` values that are no longer as in `old`; None is how a value that is gone is given and told."""
    return {name: value for name, value in new.items() if old.get(name) != value}


def applied(table: FleetTable, deltas: Iterable[TableDelta]) -> FleetTable:
    """The table that successive deltas lead to. What they leave as it was is the same object in both tables."""
    for delta in deltas:
        assert delta.version == table.version + 1, f"version {delta.version} does not follow {table.version}"
        table = msgspec.structs.replace(
            table,
            version=delta.version,
            epoch=delta.epoch,
            adapters=_updated(table.adapters, delta.adapters),
            replicas=_updated(table.replicas, _rows(table.replicas, delta.replicas)),
            copies=_updated(table.copies, delta.copies),
            aliases=_updated(table.aliases, delta.aliases),
        )
    return table


def _updated(old: dict[str, Value], changes: Mapping[str, Value | None]) -> dict[str, Value]:
    if not changes:
        return old
    new = dict(old)
    for name, value in changes.items():
        if value is None:
            new.pop(name, None)
        else:
            new[name] = value
    return new


def _rows(
    old: Mapping[str, ReplicaState], changes: Mapping[str, ReplicaState | RowChange | None]
) -> dict[str, ReplicaState | None]:
    return {
        replica_id: changed_row(old[replica_id], change) if isinstance(change, RowChange) else change
        for replica_id, change in changes.items()
    }
