"""What processes of different versions tell one another is understood by both."""

import inspect
import pickle
import typing
from typing import Any

import msgspec
import pytest
from ray import cloudpickle

from cluster.fleet import ReplicaState
from cluster.table_changes import NamesChange, RowChange, changed_row
from deployments.generation import GenerateChunk, SlotSnapshot
from deployments.replica import EngineReplica
from deployments.router import AdapterRouter
from lora_core.portable import portable
from lora_core.types import LoRAOperation, LoRARequest


def _version(**fields: Any) -> type[msgspec.Struct]:
    """A version of the class `Told` of this module."""
    described = [(name, type(value), value) for name, value in fields.items()]
    return portable(msgspec.defstruct("Told", described, frozen=True, kw_only=True, module=__name__))


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_fields_that_only_one_side_has_do_no_harm(monkeypatch: pytest.MonkeyPatch, dumps: Any) -> None:
    old, new = _version(name="", slots=0), _version(name="", slots=0, num_busy=5)
    for writer, reader, expected in [(new, old, {}), (old, new, {"num_busy": 5}), (new, new, {"num_busy": 7})]:
        told = writer(name="a", slots=3, **({"num_busy": 7} if writer is new else {}))
        monkeypatch.setitem(globals(), "Told", writer)
        written = dumps(told)
        monkeypatch.setitem(globals(), "Told", reader)
        assert pickle.loads(written) == reader(name="a", slots=3, **expected)


def test_a_row_of_a_newer_router_actor_changes_what_is_known_here() -> None:
    changes = RowChange(
        {"resident": NamesChange(("b",), ()), "in_space": NamesChange(("c",), ())}, {"num_slots": 9, "colour": "red"}
    )
    row = changed_row(ReplicaState(resident=frozenset("a"), num_slots=8), pickle.loads(pickle.dumps(changes)))
    assert row == ReplicaState(resident=frozenset("ab"), num_slots=9)


def test_structs_of_every_form_come_back_as_they_were() -> None:
    snapshot = SlotSnapshot(replica_id="r", sequence=3, resident=("a",), num_busy=2)
    chunk = GenerateChunk(text="x", token_ids=[1], snapshot=snapshot)
    for told in (chunk, LoRARequest(LoRAOperation.LOAD, "a", "/a")):
        assert pickle.loads(pickle.dumps(told)) == told


def _add_structs(hint: Any, found: set[type[msgspec.Struct]]) -> None:
    """Add the struct classes that values of a type may hold."""
    fields: dict[str, Any] = {}
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        if hint in found:
            return
        found.add(hint)
        fields = typing.get_type_hints(hint)
    elif isinstance(hint, type) and hasattr(hint, "_fields"):
        fields = typing.get_type_hints(hint)
    for inner in (*fields.values(), *typing.get_args(hint)):
        _add_structs(inner, found)


@pytest.mark.parametrize("actor", [AdapterRouter, EngineReplica])
def test_all_that_actors_are_told_and_tell_is_portable(actor: type) -> None:
    found: set[type[msgspec.Struct]] = set()
    for name, method in inspect.getmembers(actor, inspect.isfunction):
        if not name.startswith("_"):
            for hint in typing.get_type_hints(method).values():
                _add_structs(hint, found)
    assert len(found) > 5
    assert {kind.__name__ for kind in found if kind.__reduce__ is msgspec.Struct.__reduce__} == set()
