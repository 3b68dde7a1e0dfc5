"""The watchdog: what it tells, what it ends, and what it leaves alone."""

import asyncio

import pytest

from cluster.progress import BASE, Deadlines, Sign
from deployments.open_streams import OpenStreams
from deployments.watchdog import TICK_S, Watchdog
from lora_core.errors import AdapterLost, EngineDead, LoRAFleetError

DEADLINES = Deadlines(adapter_s=10, waiting_s=30, replica_s=20)


class Engine:
    """Fares as told, and notes what is done to it, in order."""

    def __init__(self) -> None:
        self.found: dict[str, Sign] = {}
        self.done: list[tuple[str, ...]] = []
        self.faults: list[LoRAFleetError] = []
        self.failing = 0
        self.failing_at = ""
        """What fails the next time."""
        self.num_heals = 0

    def signs(self) -> dict[str, Sign]:
        if self.failing:
            self.failing -= 1
            raise RuntimeError("no signs today")
        return self.found

    def fail_at(self, what: str) -> None:
        if what == self.failing_at:
            self.failing_at = ""
            raise RuntimeError(f"{what} fails today")

    def end_requests(self, name: str, fault: LoRAFleetError) -> int:
        self.fail_at("end")
        self.done.append(("end", name))
        self.faults.append(fault)
        return 1

    def reset_adapter(self, name: str, reason: str) -> None:
        self.done.append(("reset", name))

    def condemn(self, fault: EngineDead) -> None:
        self.fail_at("condemn")
        self.done.append(("condemn",))
        self.faults.append(fault)

    def count_heal(self) -> None:
        self.num_heals += 1

    def tell(self, stalled: dict[str, str], fault: str) -> None:
        self.fail_at("tell")
        self.done.append(("tell", *sorted(stalled), *(["replica"] if fault else [])))


def watched() -> tuple[Engine, Watchdog]:
    engine = Engine()
    return engine, Watchdog(engine, DEADLINES, engine.tell, engine.count_heal)


def test_a_stalled_adapter_leaves_routing_before_its_requests_end() -> None:
    engine, watchdog = watched()
    engine.found = {"a": Sign(11), "b": Sign(0)}
    watchdog.look()
    watchdog.look()
    assert engine.done == [("tell", "a"), ("end", "a"), ("reset", "a")]
    assert isinstance(engine.faults[0], AdapterLost)
    assert "watchdog.adapter_deadline_s" in str(engine.faults[0])
    engine.found = {"b": Sign(0)}
    watchdog.look()
    assert engine.done[3:] == [("tell",)]
    assert engine.num_heals == 1


def test_requests_of_the_base_model_are_ended_and_nothing_is_loaded() -> None:
    engine, watchdog = watched()
    engine.found = {BASE: Sign(11), "a": Sign(0)}
    watchdog.look()
    assert engine.done == [("tell", BASE), ("end", BASE)]
    assert isinstance(engine.faults[0], EngineDead)


async def test_a_stalled_replica_is_condemned_once() -> None:
    engine, watchdog = watched()
    engine.found = {"a": Sign(21)}
    await asyncio.wait_for(watchdog.run(), 10)
    assert engine.done == [("tell", "replica"), ("condemn",)]
    assert "watchdog.replica_deadline_s" in str(engine.faults[0])


async def test_a_look_that_fails_costs_only_itself() -> None:
    engine, watchdog = watched()
    engine.failing, engine.found = 2, {"a": Sign(21)}
    await asyncio.wait_for(watchdog.run(), 10)
    assert engine.done[-1] == ("condemn",)


@pytest.mark.parametrize(("what", "done"), [("tell", [("condemn",)]), ("condemn", [("tell", "replica"), ("condemn",)])])
async def test_a_condemnation_is_tried_again_and_waits_for_nothing(what: str, done: list[tuple[str, ...]]) -> None:
    engine, watchdog = watched()
    engine.failing_at, engine.found = what, {"a": Sign(21)}
    await asyncio.wait_for(watchdog.run(), 10)
    assert engine.done == done


@pytest.mark.parametrize(("what", "is_late"), [("tell", ("tell", "a", "b")), ("end", ("end", "a"))])
def test_a_step_that_fails_is_tried_again_and_keeps_no_other_from_being_taken(
    what: str, is_late: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    engine, watchdog = watched()
    engine.failing_at, engine.found = what, {"a": Sign(11), "b": Sign(11), "c": Sign(0)}
    watchdog.look()
    assert f"{what} fails today" in caplog.text
    heals = [("end", "a"), ("reset", "a"), ("end", "b"), ("reset", "b")]
    assert is_late not in engine.done
    assert ("reset", "b") in engine.done
    for _ in range(2):
        watchdog.look()
    assert sorted(engine.done) == sorted([("tell", "a", "b"), *heals]), "each was taken once"
    assert engine.num_heals == 2


def test_the_oldest_open_stream_of_each_name_counts() -> None:
    streams = OpenStreams()
    streams.opened("1", "a")
    streams.tick(5)
    streams.opened("2", "a")
    streams.opened("3", None)
    streams.tick(1)
    streams.progressed("2")
    assert streams.idle_s() == {"a": 6, BASE: 1}
    streams.progressed("1")
    streams.tick(TICK_S)
    assert streams.idle_s() == {"a": TICK_S, BASE: 1 + TICK_S}
    assert streams.of("a") == ["1", "2"]
    streams.closed("1")
    streams.closed("1")
    streams.progressed("1")
    assert streams.idle_s()["a"] == TICK_S
    assert streams.of("a") == ["2"]
