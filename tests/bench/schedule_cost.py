"""What it costs to choose a step's rows while many requests of many cold adapters wait for a slot."""

import statistics
import time

from tests.bench.result import report, require
from tests.unit.stepped_scheduler import SteppedScheduler

NUM_SLOTS, NUM_RUNNING = 8, 32
GOAL_US = 500


def schedule_cost(num_adapters: int, num_requests: int, steps: int = 200) -> None:
    """Time `schedule` with every slot in use, and requests of other adapters in the queue."""
    engine = SteppedScheduler(
        num_slots=NUM_SLOTS, num_blocks=20_000, block_size=16, max_num_seqs=64, max_num_batched_tokens=512,
        max_slot_wait_s=1e9, host_adapters=2 * NUM_SLOTS, checks=False,
    )  # fmt: skip
    for index in range(NUM_RUNNING):
        engine.add(f"hot{index % NUM_SLOTS}", prompt=16, max_tokens=steps + 100)
    for _ in range(40):
        engine.step()
    require(engine.scheduler.num_running == NUM_RUNNING, "not all of the first requests run")
    for index in range(num_requests):
        engine.add(f"cold{index % num_adapters}", prompt=64)
    for _ in range(20):
        engine.step()
    seconds = []
    schedule = engine.scheduler.schedule
    for _ in range(steps):
        started_s = time.perf_counter()
        batch = schedule()
        seconds.append(time.perf_counter() - started_s)
        engine.scheduler.advance(batch)
        for row in batch.rows:
            row.request.token_ids.append(1)
    require(engine.scheduler.num_waiting == num_requests, "some of those that were to wait did not")
    median_us = 1e6 * statistics.median(seconds)
    report(
        "schedule_cost", adapters=num_adapters, requests=num_requests, slots=NUM_SLOTS, running=NUM_RUNNING,
        median_us=median_us, p90_us=1e6 * sorted(seconds)[int(0.9 * len(seconds))],
        compared="wall time of one call of schedule, median of the steps, with a fixed goal",
        goal=f"median_us < {GOAL_US}", met=median_us < GOAL_US,
    )  # fmt: skip
