"""A part of `make chaos`, on a fleet of its own: faults that heal in seconds."""

from pathlib import Path

from tests.chaos.faults import FAULTS
from tests.chaos.fleet import chaos_fleet
from tests.chaos.run import run, summary

NAMES = ("lose an acknowledgement", "fill the journal's disk", "kill the router actor")


def test_faults_cost_no_request_and_no_token(tiny_base: Path, tiny_adapters: dict[str, Path], tmp_path: Path) -> None:
    faults = [fault for fault in FAULTS if fault.name in NAMES]
    assert len(faults) == len(NAMES)
    with chaos_fleet(tmp_path, tiny_base, tiny_adapters) as fleet:
        survivals = run(fleet, faults)
    assert [survival.why_not for survival in survivals] == [None] * len(faults)
    assert summary(faults, survivals) == (len(faults), len(faults), 0, 0)
    assert all(survival.tally.counts["right"] > 0 for survival in survivals)
