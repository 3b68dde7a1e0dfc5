"""`AdapterLanes`: order within a lane, none between lanes, and what is left when a replica registers again."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.changes import Change
from cluster.names import staged_name
from deployments.adapter_lanes import AdapterLanes, Step
from deployments.bell import Bell
from lora_core.types import LoRAOperation, LoRARequest


def step(name: str, epoch: int, reason: str | None = None) -> Step:
    return Step(Change(epoch=epoch, request=LoRARequest(LoRAOperation.LOAD, name)), epoch, reason)


class Work:
    """Steps begin as they may, and end when their gate is opened."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.acknowledged: list[int | None] = []
        self.gates: dict[str, asyncio.Semaphore] = {}
        self.progress = Bell()
        self.lanes = AdapterLanes(self.run, self.progress)

    def gate(self, name: str) -> asyncio.Semaphore:
        return self.gates.setdefault(name, asyncio.Semaphore(0))

    async def run(self, step: Step) -> None:
        name = step.change.request.lora_name
        self.begun.append((name, step.change.epoch))
        await self.gate(name).acquire()
        self.acknowledged.append(step.epoch)

    async def put(self, *steps: Step) -> None:
        for each in steps:
            self.lanes.put(each)
        await asyncio.sleep(0)

    async def end_one(self, name: str) -> None:
        self.gate(name).release()
        assert await self.progress.wait(1)
        await asyncio.sleep(0)


@pytest.fixture
async def work() -> AsyncIterator[Work]:
    work = Work()
    yield work
    await work.lanes.close()


async def test_a_lane_is_in_order_and_waits_for_no_other(work: Work) -> None:
    await work.put(step("a", 1), step("a", 2), step("b", 3), step(staged_name("b"), 4), step("c", 5))
    assert work.begun == [("a", 1), ("b", 3), ("c", 5)], "what is staged is in the lane of what it is to replace"
    await work.end_one("b")
    assert work.begun[3:] == [(staged_name("b"), 4)]
    await work.end_one("a")
    assert work.begun[4:] == [("a", 2)]
    await work.end_one("a")
    await work.put(step("a", 6))
    assert work.begun[5:] == [("a", 6)], "a lane that was through is begun anew"


async def test_what_is_left_to_do_up_to_an_epoch(work: Work) -> None:
    await work.put(step("a", 1), step("a", 5), step("b", 2))
    assert [work.lanes.is_through("a", epoch) for epoch in (0, 1, 5)] == [True, False, False]
    await work.end_one("a")
    assert [work.lanes.is_through("a", epoch) for epoch in (1, 4, 5)] == [True, True, False]
    await work.end_one("a")
    assert work.lanes.is_through("a", 5)
    await work.put(step("a", 9, reason="other content"))
    assert not work.lanes.is_through("a", 5), "what is to be given up is not served meanwhile"


async def test_only_what_is_under_way_or_given_up_outlasts_a_registration(work: Work) -> None:
    await work.put(step("a", 1), step("a", 2), step("a", 3, reason="other content"), step("b", 4))
    await work.end_one("b")
    assert work.lanes.names == {"a"}
    work.lanes.disown()
    assert work.lanes.names == {"a"}
    await work.put(step("a", 7))
    await work.end_one("a")
    await work.end_one("a")
    await work.end_one("a")
    assert work.begun == [("a", 1), ("b", 4), ("a", 3), ("a", 7)]
    assert work.acknowledged == [4, None, 3, 7], "nobody waits for what was under way"


async def test_a_step_that_raises_is_logged_and_the_next_one_is_begun(caplog: pytest.LogCaptureFixture) -> None:
    done = []

    async def run(step: Step) -> None:
        if step.change.epoch == 1:
            raise KeyError("a fault of ours")
        done.append(step.change.epoch)

    lanes = AdapterLanes(run, progress := Bell())
    for epoch in (1, 2):
        lanes.put(step("a", epoch))
    assert await progress.wait(1)
    await asyncio.sleep(0)
    assert (done, lanes.is_through("a", 2)) == ([2], True)
    assert "a fault of ours" in caplog.text
    lanes.put(step("a", 3))
    assert await progress.wait(1)
    assert done == [2, 3], "the lane is begun anew"
    await lanes.close()


async def test_closing_gives_up_what_is_under_way(work: Work) -> None:
    await work.put(step("a", 1), step("b", 2))
    await work.lanes.close()
    assert work.acknowledged == []
    assert work.lanes.is_through("a", 9)
