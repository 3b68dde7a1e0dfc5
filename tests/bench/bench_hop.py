"""`make bench-hop`: processor time per request and per streamed token, of everything but the engine.

An engine process that computes nothing stands behind the product's own replica and ingress, over HTTP and by handle,
with Ray's default settings and its throughput-optimised ones. Prints one JSON line per point:

    routing        `one_token` over `plain`: the same application with this project's request router and with Ray's own
                   (power of two choices), each token sent by itself in both. For a request of one token, and per token
                   of a stream.
    grouping       `ours` over `one_token`, per token: tokens sent together, as the product does, over each by itself
                   when it comes, with 16 streams of up to 200 tokens a second each.

What all of them take while idle is taken off. Rounds of the applications alternate, so that the machine's other work
meets all; figures are means over rounds, with the half width of their 95 % interval (Student's t). Answers are
checked in each call.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from deployments.local_cluster import ENVIRONMENT
from tests.bench.hop_apps import KINDS, Hop, running
from tests.bench.hop_load import Cost, Front, idle_rate
from tests.bench.random_adapter import write_adapter
from tests.bench.result import CheckFailed, report
from tests.factories import tiny_llama

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "throughput": {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"},
}
STREAMS, TOKENS = 16, 128
WIDEST = 0.15
"""Half width of a ratio beyond which it says nothing."""
T95 = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""Student's t for 95 %, two-sided, by how many rounds there are."""

Measure = Callable[[Front], Cost]


def measures(num_calls: int, num_tokens: int) -> dict[str, tuple[Measure, int]]:
    """By name: what to run, and by how many requests or tokens its cost is divided."""
    tokens = STREAMS * num_tokens
    return {
        "request_http": (partial(_calls, way="over_http", num_calls=num_calls), num_calls),
        "request_handle": (partial(_calls, way="by_handle", num_calls=num_calls), num_calls),
        "token_http": (partial(_streams, way="over_http", num_tokens=num_tokens), tokens),
        "token_handle": (partial(_streams, way="by_handle", num_tokens=num_tokens), tokens),
    }


def _calls(front: Front, *, way: str, num_calls: int) -> Cost:
    cost: Cost = getattr(front, way)(num_calls, 8, 1, stream=False)
    return cost


def _streams(front: Front, *, way: str, num_tokens: int) -> Cost:
    cost: Cost = getattr(front, way)(STREAMS, STREAMS, num_tokens, stream=True)
    return cost


class Rounds:
    """The costs of one measure, by application and round."""

    def __init__(self, name: str, settings: str, divisor: int) -> None:
        self._name, self._settings, self._divisor = name, settings, divisor
        self._costs: dict[str, list[Cost]] = {kind: [] for kind in KINDS}

    def add(self, kind: str, cost: Cost) -> None:
        """Note a round."""
        self._costs[kind].append(cost)

    def us(self, kind: str) -> list[float]:
        """Microseconds of processor time per request or token, by round."""
        return [1e6 * cost.cpu_s / self._divisor for cost in self._costs[kind]]

    def tell(self) -> None:
        """Print the points."""
        if self._name.startswith("request"):
            self._tell("routing", "one_token", "plain", most=None)
        else:
            self._tell("routing", "one_token", "plain", most=None)
            self._tell("grouping", "ours", "one_token", most=1 / 3)

    def _tell(self, point: str, mine: str, other: str, *, most: float | None) -> None:
        ratios = [a / b for a, b in zip(self.us(mine), self.us(other), strict=True)]
        ratio, half = statistics.mean(ratios), _half_width(ratios)
        goal = f"ratio < {most:.3f}" if most else "ratio - half_width <= 1: no difference is to be seen"
        figures: dict[str, float] = {}
        for kind in (mine, other):
            figures[f"{kind}_us"] = statistics.mean(self.us(kind))
            figures[f"{kind}_median_ms"] = 1e3 * statistics.median(cost.median_s for cost in self._costs[kind])
            if self._name.startswith("token"):
                num_chunks = statistics.mean(cost.num_chunks for cost in self._costs[kind])
                figures[f"{kind}_tokens_per_chunk"] = self._divisor / num_chunks
        met = ratio < most if most else ratio - half <= 1
        report(
            f"{point} {self._name} {self._settings}", ratio=ratio, half_width=half, rounds=len(ratios), **figures,
            compared=f"{mine} over {other}, processor time", goal=goal,
            met=met if half <= WIDEST else None,
        )  # fmt: skip


def _half_width(values: list[float]) -> float:
    if len(values) < 2:
        return float("inf")
    return T95[min(len(values), max(T95))] * statistics.stdev(values) / math.sqrt(len(values))


def measure(hop: Hop, settings: str, rounds: int, num_calls: int, num_tokens: int) -> None:
    """All points with one of Ray's settings."""
    rate = idle_rate(hop)
    fronts = {kind: Front(hop, kind, rate) for kind in KINDS}
    for name, (run, divisor) in measures(num_calls, num_tokens).items():
        results = Rounds(name, settings, divisor)
        # Connections, code paths and caches of the first calls are not what later ones cost.
        for front in fronts.values():
            run(front)
        for turn in range(rounds):
            for kind in sorted(fronts, reverse=bool(turn % 2)):
                results.add(kind, run(fronts[kind]))
        results.tell()


def main() -> int:
    """Run the benchmark; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--calls", type=int, default=160, help="requests of a round, in multiples of 8")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each stream of a round")
    parser.add_argument("--settings", choices=SETTINGS, action="append", help="of Ray; all of them if none is named")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.here:
        # One that was killed has a status below 0.
        statuses = [_in_a_process(settings, given) for settings in given.settings or SETTINGS]
        return int(any(statuses))
    (settings,) = given.settings
    with tempfile.TemporaryDirectory() as folder:
        base = tiny_llama(Path(folder) / "base")
        adapter = write_adapter(base, Path(folder) / "adapter", rank=8)
        try:
            with running(base, adapter, SETTINGS[settings]) as hop:
                measure(hop, settings, given.rounds, given.calls, given.tokens)
        except CheckFailed as error:
            print(f"{settings}: not timed: {error}", file=sys.stderr)
            return 1
    return 0


def _in_a_process(settings: str, given: argparse.Namespace) -> int:
    """Run with one of Ray's settings; Ray reads them, and how to join a cluster of one's own, when it is imported."""
    command = [sys.executable, "-m", "tests.bench.bench_hop", "--here", "--settings", settings]
    command += [f"--rounds={given.rounds}", f"--calls={given.calls}", f"--tokens={given.tokens}"]
    return subprocess.run(command, env={**os.environ, **ENVIRONMENT, **SETTINGS[settings]}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
