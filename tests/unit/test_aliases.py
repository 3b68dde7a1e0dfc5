"""Aliases: which adapter a request gets, and what the journal keeps of them."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.aliases import MAX_MOVES_KEPT, AliasBook, choose
from cluster.fleet import Alias
from cluster.journal import Journal
from cluster.registry import AdapterRegistry
from lora_core.errors import AdapterNameTaken, AdapterNotFound, InvalidRequest, LoRAFleetError

KEYS = [f"request-{number}" for number in range(4000)]


def alias(**targets: float) -> Alias:
    return Alias(name="x", targets=targets, epoch=1)


def loaded(registry: AdapterRegistry, *names: str) -> None:
    for name in names:
        registry.begin_load(name, f"/{name}")
        registry.commit_load(name)


def test_requests_are_shared_out_by_weight() -> None:
    counts = Counter(choose(alias(a=0.7, b=0.2, c=0.1, never=0.0), key) for key in KEYS)
    assert counts["never"] == 0
    for name, share in (("a", 0.7), ("b", 0.2), ("c", 0.1)):
        # Four standard errors; the keys are always the same ones.
        assert abs(counts[name] / len(KEYS) - share) < 4 * (share * (1 - share) / len(KEYS)) ** 0.5


def test_a_move_takes_only_as_many_requests_from_an_adapter_as_its_share_falls() -> None:
    before, after = alias(a=0.9, b=0.1), alias(a=0.6, b=0.4)
    moves = Counter((choose(before, key), choose(after, key)) for key in KEYS)
    assert moves["b", "a"] == 0
    assert abs(moves["a", "b"] / len(KEYS) - 0.3) < 0.03


@given(
    targets=st.dictionaries(st.text(min_size=1, max_size=5), st.floats(0, 1), min_size=1, max_size=5).filter(
        lambda found: sum(found.values()) > 0
    ),
    key=st.text(),
)
def test_the_same_request_gets_the_same_adapter_in_whatever_order_they_stand(
    targets: dict[str, float], key: str
) -> None:
    chosen = choose(alias(**targets), key)
    assert targets[chosen] > 0
    assert choose(alias(**dict(reversed(targets.items()))), key) == chosen


def test_aliases_and_what_they_stood_for_survive_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.sqlite"
    registry = AdapterRegistry(path)
    loaded(registry, "m@1", "m@2", "m@3")
    for targets in ({"m@1": 1}, {"m@1": 9, "m@2": 1}, {"m@2": 1}, {"m@3": 1}):
        registry.set_alias("m", targets)
    registry.set_alias("gone", {"m@1": 1})
    removed = registry.remove_alias("gone")
    rolled = registry.roll_back_alias("m")
    assert (rolled.targets, rolled.epoch) == ({"m@2": 1.0}, registry.epoch)
    assert rolled.epoch > removed
    # A clock that has been put back does not bring epochs back.
    monkeypatch.setattr("cluster.journal.time.time_ns", lambda: 10**15)
    successor = AdapterRegistry(path)
    assert successor.aliases.all() == registry.aliases.all()
    assert successor.epoch == registry.epoch
    assert [successor.roll_back_alias("m").targets for _ in range(2)] == [{"m@1": 0.9, "m@2": 0.1}, {"m@1": 1.0}]
    with pytest.raises(InvalidRequest, match="has not been moved"):
        successor.roll_back_alias("m")
    assert AdapterRegistry(path).aliases.all() == successor.aliases.all()


def test_every_move_is_one_epoch_and_no_adapters_generation(tmp_path: Path) -> None:
    registry = AdapterRegistry(tmp_path / "journal.sqlite")
    loaded(registry, "a", "b")
    epochs = [registry.epoch, *(registry.set_alias("x", {target: 1}).epoch for target in "abab")]
    epochs.append(registry.roll_back_alias("x").epoch)
    epochs.append(registry.remove_alias("x"))
    assert epochs == list(range(epochs[0], epochs[0] + len(epochs)))
    loaded(registry, "c")
    assert registry.entries["c"].generation == epochs[-1] + 1
    assert registry.changes_since(epochs[0]) == registry.changes_since(epochs[-1])


def test_only_so_many_moves_can_be_rolled_back(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    registry = AdapterRegistry(path)
    loaded(registry, "a", "b")
    for number in range(3 * MAX_MOVES_KEPT):
        registry.set_alias("x", {"ab"[number % 2]: 1})
    (found,) = AdapterRegistry(path).aliases.all()
    assert len(found.before) == MAX_MOVES_KEPT
    assert [move.epoch for move in found.before] == sorted((move.epoch for move in found.before), reverse=True)


def test_a_rollback_to_what_is_no_longer_loaded_is_refused_and_changes_nothing() -> None:
    registry = AdapterRegistry()
    loaded(registry, "a", "b")
    registry.set_alias("x", {"a": 1})
    registry.set_alias("x", {"b": 1})
    registry.begin_unload("a")
    registry.finish_unload("a")
    with pytest.raises(InvalidRequest, match="no adapter named 'a' is loaded; loaded: b; load it again"):
        registry.roll_back_alias("x")
    assert registry.aliases.current["x"].targets == {"b": 1.0}
    loaded(registry, "a")
    assert registry.roll_back_alias("x").targets == {"a": 1.0}


def test_names_are_an_adapters_or_an_aliases() -> None:
    registry = AdapterRegistry()
    loaded(registry, "a")
    registry.set_alias("x", {"a": 1})
    with pytest.raises(AdapterNameTaken, match="'a' is an adapter"):
        registry.set_alias("a", {"a": 1})
    with pytest.raises(InvalidRequest, match="no adapter named 'x'"):
        registry.set_alias("y", {"x": 1})
    with pytest.raises(AdapterNotFound, match="no alias named 'y'; aliases: x"):
        registry.remove_alias("y")


def test_targets_that_the_configuration_no_longer_names_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    registry = AdapterRegistry(path, static={"s": "/s", "t": "/t"}, run="1")
    registry.set_alias("both", {"s": 1, "t": 3})
    registry.set_alias("one", {"s": 1})
    successor = AdapterRegistry(path, static={"t": "/t"}, run="2")
    assert {name: found.targets for name, found in successor.aliases.current.items()} == {"both": {"t": 1.0}}
    assert successor.aliases.all() == AdapterRegistry(path, static={"t": "/t"}, run="2").aliases.all()


def test_a_name_that_the_configuration_gives_to_an_adapter_is_no_alias_any_more(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    registry = AdapterRegistry(path, static={"s": "/s"}, run="1")
    for name in ("taken", "kept"):
        registry.set_alias(name, {"s": 1})
    successor = AdapterRegistry(path, static={"s": "/s", "taken": "/t"}, run="2")
    assert successor.aliases.current.keys() == {"kept"}
    assert successor.begin_unload("taken").request.generation == successor.entries["taken"].generation
    assert successor.aliases.all() == AdapterRegistry(path, static={"s": "/s"}, run="3").aliases.all()


def test_a_move_that_cannot_be_journalled_did_not_happen(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    registry = AdapterRegistry(path)
    loaded(registry, "a", "b")
    registry.set_alias("x", {"a": 1})
    registry.set_alias("x", {"b": 1})
    before, epoch = registry.aliases.all(), registry.epoch
    successor = AdapterRegistry(path)
    for move in (
        lambda: registry.set_alias("x", {"a": 1}),
        lambda: registry.roll_back_alias("x"),
        lambda: registry.remove_alias("x"),
    ):
        with pytest.raises(LoRAFleetError, match="replaced"):
            move()
    assert (registry.aliases.all(), registry.epoch) == (before, epoch)
    assert successor.aliases.all() == before


def test_weights_that_are_no_numbers_are_refused() -> None:
    book = AliasBook(Journal(None), {"a": None})
    for weight in ("1", None, True, float("nan"), float("inf"), -0.1, 10**400):
        with pytest.raises(InvalidRequest, match="the weight of 'a'"):
            book.set("x", {"a": weight}, 0)  # type: ignore[dict-item]
