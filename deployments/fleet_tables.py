"""The operator's view as tables for a terminal."""

from collections.abc import Iterable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from cluster.status import AdapterReport, FleetReport, ReplicaReport

SHOWN_NAMES = 6
"""Names of one cell; how many more there are is said."""

GOOD, BAD, BUSY = "green", "bold red", "yellow"


def fleet_view(fleet: FleetReport, adapters: Iterable[AdapterReport]) -> Group:
    """Everything: a line of summary, the replicas, the adapters, and what failed of names that are not there."""
    adapters = list(adapters)
    shown = {adapter.name for adapter in adapters}
    faults = [
        Text(f"{name}: {failure.text}", style=BAD) for name, failure in fleet.failures.items() if name not in shown
    ]
    return Group(Text(summary(fleet)), replicas_table(fleet), adapters_table(adapters), *faults)


def summary(fleet: FleetReport) -> str:
    """The fleet in one line."""
    states = ", ".join(f"{count} {state}" for state, count in sorted(fleet.num_adapters.items())) or "none"
    behind = sum(replica.lag > 0 for replica in fleet.replicas.values())
    where = "all replicas are there" if not behind else f"{behind} of {len(fleet.replicas)} replicas are behind"
    return f"epoch {fleet.epoch}, {where}; adapters: {states}; {fleet.num_copies} slots granted to copies"


def replicas_table(fleet: FleetReport) -> Table:
    """One row a replica."""
    table = Table(
        "replica", "state", "behind", "slots", "host", "run", "wait", "ms/request", "in slots", box=None, pad_edge=False
    )
    for replica_id, replica in sorted(fleet.replicas.items()):
        state = replica_state(replica)
        table.add_row(
            Text(replica_id),
            Text(state, style=GOOD if state == "serving" else BUSY if state in ("joining", "leaving") else BAD),
            str(replica.lag),
            f"{replica.num_slots_used}/{replica.num_slots}",
            str(replica.num_in_memory),
            str(replica.num_running),
            str(replica.num_waiting),
            "" if replica.service_ms is None else f"{replica.service_ms:.1f}",
            _names(replica.resident),
        )
    return table


def replica_state(replica: ReplicaReport) -> str:
    """A replica in a word, and why where it does not serve everything."""
    if replica.fault is not None:
        return f"stalled: {replica.fault}"
    if replica.leaving:
        return "leaving"
    if not replica.joined:
        return "joining"
    faults = {**replica.refused, **replica.stalled}
    return "serving" if not faults else f"serving, without {', '.join(sorted(faults))}"


def adapters_table(adapters: Iterable[AdapterReport]) -> Table:
    """One row an adapter."""
    table = Table(
        "adapter", "state", "pin", "copies", "share", "applied", "slot", "host", "run", "wait", box=None, pad_edge=False
    )
    table.add_column("last error", overflow="fold")
    for adapter in adapters:
        replicas = adapter.replicas.values()
        applied = sum(one.acknowledged == "applied" for one in replicas)
        table.add_row(
            Text(adapter.name),
            Text(_state(adapter), style=GOOD if adapter.state == "ready" else BUSY),
            "pin" if adapter.pinned else "",
            str(max(len(adapter.copies), adapter.min_copies)),
            f"{adapter.share:.1%}",
            Text(f"{applied}/{len(replicas)}", style=GOOD if applied == len(replicas) else BAD),
            str(sum(one.tier == "slot" for one in replicas)),
            str(sum(one.tier == "host" for one in replicas)),
            str(sum(one.num_running for one in replicas)),
            str(sum(one.num_waiting for one in replicas)),
            Text(last_error(adapter), style=BAD),
        )
    return table


def adapter_table(adapter: AdapterReport) -> Group:
    """One adapter in detail: a row for each replica."""
    table = Table("replica", "acknowledged", "tier", "run", "wait", "idle s", box=None, pad_edge=False)
    table.add_column("error", overflow="fold")
    for replica_id, one in sorted(adapter.replicas.items()):
        table.add_row(
            Text(replica_id),
            Text(one.acknowledged, style=GOOD if one.acknowledged == "applied" else BAD),
            one.tier,
            str(one.num_running),
            str(one.num_waiting),
            f"{one.oldest_idle_s:.1f}" if one.num_running + one.num_waiting else "",
            Text(one.error or "", style=BAD),
        )
    granted = ", ".join(adapter.copies) or "the replica its name gives"
    lines = [
        f"{adapter.name}: {_state(adapter)}, from {adapter.path}",
        f"generation {adapter.generation}, epoch {adapter.epoch}, content {adapter.content_hash or 'not known'}",
        f"share {adapter.share:.1%}, at least {adapter.min_copies} copies, on {granted}"
        + (", pinned" if adapter.pinned else ""),
    ]
    if adapter.last_error is not None:
        lines.append(f"last error: {adapter.last_error.text}")
    return Group(*map(Text, lines), table)


def last_error(adapter: AdapterReport) -> str:
    """What is wrong with an adapter now, replica by replica; else what last went wrong with a change of it."""
    faults = [f"{replica_id}: {one.error}" for replica_id, one in sorted(adapter.replicas.items()) if one.error]
    if faults:
        return "; ".join(faults)
    return "" if adapter.last_error is None else adapter.last_error.text


def _state(adapter: AdapterReport) -> str:
    return adapter.state if adapter.replaced_by is None else f"{adapter.state}, being replaced"


def _names(names: tuple[str, ...]) -> Text:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return Text(", ".join(names[:SHOWN_NAMES]) + more)
