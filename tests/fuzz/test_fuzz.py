"""A short run of the fuzz: 20,000 steps of loads, reloads, unloads, pins, evictions, aborts and mixed batches."""

from pathlib import Path

from tests.fuzz.drive import Fuzz
from tests.fuzz.world import QuietRuns, World

STEPS = 20_000
STEPS_OF_RANKS = 1_500


def test_no_answer_differs_from_a_quiet_run(tmp_path: Path) -> None:
    world = World(tmp_path)
    fuzz = Fuzz(world, QuietRuns(world), seed=0)
    fuzz.run(STEPS)
    # A run in which something never happened has not tried it.
    for what in (
        "answers",
        "load",
        "replace",
        "unload",
        "pin",
        "unpin",
        "aborts",
        "hides",
        "renumber",
        "stalls",
        "AdapterLost",
        "cached_tokens",
        "preempted",
        "put_back",
    ):
        assert fuzz.counts[what] > 0, f"{what} never happened: {fuzz.counts}"
    assert fuzz.counts["tokens"] > STEPS / 2


def test_no_answer_of_two_ranks_differs_from_a_quiet_run_on_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    fuzz = Fuzz(world, QuietRuns(world), seed=7, num_ranks=2)
    fuzz.run(STEPS_OF_RANKS)
    for what in ("answers", "replace", "unload", "aborts", "cached_tokens", "preempted"):
        assert fuzz.counts[what] > 0, f"{what} never happened: {fuzz.counts}"
