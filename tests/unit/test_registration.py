"""What a replica that registers is told, on its way there."""

import pickle
from typing import Any

from cluster.catch_up import catch_up
from cluster.entry import AdapterEntry
from cluster.fleet import Registration


def entry(name: str, generation: int, **settings: Any) -> AdapterEntry:
    return AdapterEntry(name=name, path=f"/adapters/{name}", generation=generation, state="ready", **settings)


def test_a_registration_arrives_as_it_was_sent() -> None:
    entries = [entry("new", 3), entry("swapped", 5), entry("static", 2, static=True), entry("ü", 7, pinned=True)]
    changes = catch_up({one.name: one for one in entries}, 9, {"swapped": 4, "gone": 1}, ["new"])
    assert {change.request.operation.value for change in changes} == {"load", "unload", "pin"}
    sent = Registration(epoch=9, changes=changes, router_name="router", lease_s=2.5, work_period_s=7.0)
    assert pickle.loads(pickle.dumps(sent)) == sent


def test_a_registration_of_many_adapters_is_small() -> None:
    entries = {f"a{number}": entry(f"a{number}", number + 1) for number in range(1000)}
    sent = Registration(epoch=1000, changes=catch_up(entries, 1000, {}, ()), router_name="router")
    assert len(pickle.dumps(sent)) < 150 * len(entries)
