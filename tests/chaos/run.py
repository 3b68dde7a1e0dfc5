"""Inflict faults on a fleet under load, one after another, and say what survived."""

import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from tests.chaos.faults import Fault
from tests.chaos.fleet import ChaosFleet
from tests.chaos.load import CUT, Load, Tally

ANSWERS_AFTER = 12
"""Answers that must come once the fleet has settled."""

ATTEMPTS = 4
"""How often something is killed until a stream was on it."""


class Survival(NamedTuple):
    """What came of one fault."""

    fault: str
    why_not: str | None
    """What was wrong; None where it was survived."""
    tally: Tally
    seconds: float


class Summary(NamedTuple):
    """What came of all."""

    faults: int
    survived: int
    lost_requests: int
    wrong_tokens: int


def run(fleet: ChaosFleet, faults: Sequence[Fault], *, seed: int = 0) -> list[Survival]:
    """Inflict each fault, wait until the fleet has settled and answers, and judge every request of that time.

    One that is not survived ends the run: the state of what comes after it would say nothing.
    """
    survivals: list[Survival] = []
    with Load(fleet.url, fleet.quiet_run(), seed=seed) as load:
        load.wait_for(ANSWERS_AFTER)
        for fault in faults:
            survivals.append(_inflict(fleet, fault, load))
            report(survivals[-1])
            if survivals[-1].why_not is not None:
                break
    return survivals


def summary(faults: Sequence[Fault], survivals: Sequence[Survival]) -> Summary:
    """The counts of a run."""
    counts = [survival.tally.counts for survival in survivals]
    return Summary(
        faults=len(faults),
        survived=sum(survival.why_not is None for survival in survivals),
        lost_requests=sum(count["lost"] for count in counts),
        wrong_tokens=sum(count["wrong"] for count in counts),
    )


def _inflict(fleet: ChaosFleet, fault: Fault, load: Load) -> Survival:
    started = time.monotonic()
    load.next_stretch()
    why_not: str | None = None
    num_times = 0
    try:
        while num_times == 0 or (fault.cuts_streams and not load.num_cut):
            assert num_times < ATTEMPTS, "no stream was on what was killed, so that nothing is known of such streams"
            num_times += 1
            fault.inflict(fleet)
            fleet.settle()
        after = load.num_answers
        load.wait_for(after + ANSWERS_AFTER)
    except Exception as error:
        why_not = f"{type(error).__name__}: {error}"
    tally = load.next_stretch()
    # A client has one request at a time: so many can have been on what was killed, and none where nothing was.
    num_excused = num_times * load.num_clients if fault.ends_streams else 0
    if (num_lost := tally.counts[CUT] - num_excused) > 0:
        tally.counts["lost"] += num_lost
        tally.faults.append(f"{num_lost} stream(s) {CUT} that were on nothing that was killed")
    if why_not is None and tally.faults:
        why_not = f"{len(tally.faults)} request(s) lost or wrong"
    return Survival(fault.name, why_not, tally, time.monotonic() - started)


def report(survival: Survival) -> None:
    """Say it in a line, and each fault of a request in one more."""
    counts = ", ".join(f"{count} {what}" for what, count in sorted(survival.tally.counts.items()))
    verdict = "survived" if survival.why_not is None else f"NOT survived: {survival.why_not}"
    print(f"{survival.fault}: {verdict} ({survival.seconds:.1f} s; requests: {counts})", file=sys.stderr)
    for line in survival.tally.faults[:10]:
        print(f"    {line}", file=sys.stderr)
