"""Systems compared in their own processes: first their tokens in fp32, then their times, by turns."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tests.bench.peers.points import Point, Results
from tests.bench.peers.process import Peer, PeerFailed
from tests.bench.peers.systems import START_S, System, Workplace

CHECKED_TOKENS = 32
NEAR_TIE = 1e-4
"""Logits closer than this in fp32 may change order with the order of a sum."""

Wrong = set[tuple[str, Point]]
"""Systems and the points at which they are not timed."""


def check(
    reference: System, systems: Sequence[System], points: Sequence[Point], place: Workplace, results: Results
) -> Wrong:
    """Compare every system's fp32 tokens with the reference's, and report those that differ.

    A row is compared up to its first near tie. The reference must answer at all; a system that does not is wrong at
    all of its points.
    """
    wrong: Wrong = set()
    with reference.start(place, "float32") as peer:
        peer.wait_until_ready(START_S)
        right = {}
        for system in systems:
            asked = [point for point in points if system.runs(point)]
            if system == reference:
                continue
            try:
                with system.start(place, "float32") as compared:
                    compared.wait_until_ready(START_S)
                    for point in asked:
                        if point not in right:
                            right[point] = peer.generate(point.prompts(), point.names, _num_checked(point)).tokens
                        found = compared.generate(point.prompts(), point.names, _num_checked(point)).tokens
                        if not _agree(point, found, right[point], peer):
                            wrong.add((system.name, point))
                            error = f"fp32 tokens differ from {reference.name}'s"
                            results.add(system=system.name, **point.figures(), error=error)
            except PeerFailed as failure:
                wrong |= {(system.name, point) for point in asked}
                results.add(system=system.name, dtype="float32", error=str(failure))
    return wrong


def _num_checked(point: Point) -> int:
    return min(CHECKED_TOKENS, point.new_tokens)


def _agree(point: Point, found: list[list[int]], right: list[list[int]], reference: Peer) -> bool:
    """Whether all rows have the same tokens, up to the first near tie of each."""
    for prompt, name, answer, expected in zip(point.prompts(), point.names, found, right, strict=True):
        if answer != expected:
            same = next(index for index, (a, b) in enumerate(zip(answer, expected, strict=True)) if a != b)
            if reference.margin(prompt + expected[:same], name) > NEAR_TIE:
                return False
    return True


@dataclass
class _Turn:
    """What one system does at one point, and how long it took."""

    system: System
    peer: Peer
    point: Point
    beside: int | None
    first_s: float = float("inf")
    wall_s: float = float("inf")
    slowest_s: float = 0.0
    together_tok_s: float | None = None

    def warm(self) -> None:
        """Once, untimed: what is allocated or chosen at a batch's first time is not part of it."""
        self.peer.resume()
        self.peer.generate(self.point.prompts(), self.point.names, 2)
        self.peer.pause()

    def take(self) -> None:
        """Time a first token and a whole answer."""
        prompts, names = self.point.prompts(), self.point.names
        self.peer.resume()
        self.first_s = min(self.first_s, self.peer.generate(prompts, names, 1).wall_s)
        _, wall_s, rate = self.peer.generate(prompts, names, self.point.new_tokens)
        self.peer.pause()
        self.wall_s, self.slowest_s = min(self.wall_s, wall_s), max(self.slowest_s, wall_s)
        if rate is not None:
            self.together_tok_s = max(self.together_tok_s or 0.0, rate)

    def line(self) -> dict[str, object]:
        """Its figures."""
        line: dict[str, object] = {"system": self.system.name, **self.point.figures()}
        if self.beside is not None:
            line["beside"] = self.beside
        line |= rates(self.point, self.first_s, self.wall_s)
        return {**line, "together_tok_s": self.together_tok_s, "slowest_s": self.slowest_s}


def rates(point: Point, first_s: float, wall_s: float) -> dict[str, float | None]:
    """Decode and prefill rates in tokens per second, of a batch whose first tokens and whole answers took so long.

    There is no decode rate where the whole answers took no longer than their first tokens: something else took the
    machine's time.
    """
    decode = point.batch * (point.new_tokens - 1) / (wall_s - first_s) if wall_s > first_s else None
    prefill = point.batch * point.prompt_tokens / first_s
    return {"decode_tok_s": decode, "prefill_tok_s": prefill, "first_token_s": first_s, "wall_s": wall_s}


def measure(
    systems: Sequence[System], points: Sequence[Point], place: Workplace, results: Results, *, rounds: int, wrong: Wrong
) -> None:
    """Time every point that is not wrong, all systems by turns.

    Their processes are all there at once, for as long as points remain that they answer; those whose turn it is not
    are paused: some take a good part of a core to wait. A step with many adapters is compared with one without, so the
    first system, which has none, also takes its turn at the points with most adapters, on base rows.
    """
    most = max(point.adapters for point in points)
    with ExitStack() as stack:
        started = _started(systems, points, place, results, stack)
        for index, point in enumerate(points):
            turns = [
                _Turn(system, peer, point, None)
                for system, peer in started
                if system.runs(point) and (system.name, point) not in wrong
            ]
            if most and point.adapters == most and not point.is_mixed:
                turns += [_Turn(system, peer, point.base(), most) for system, peer in started if system is systems[0]]
            for turn in list(_taken(turns, rounds, results)):
                results.add(**turn.line(), dtype="bfloat16")
            left = points[index + 1 :]
            started = list(_still_needed(started, left, always=systems[0]))


def _started(
    systems: Sequence[System], points: Sequence[Point], place: Workplace, results: Results, stack: ExitStack
) -> list[tuple[System, Peer]]:
    """The systems that have started; one after the other, so that compiling does not disturb loading."""
    started = []
    for system in systems:
        if not any(system.runs(point) for point in points):
            continue
        peer = stack.enter_context(system.start(place, "bfloat16"))
        try:
            versions = peer.wait_until_ready(START_S)
        except PeerFailed as failure:
            results.add(system=system.name, dtype="bfloat16", error=str(failure))
            continue
        results.add(system=system.name, versions=versions, resident_mb=peer.resident_bytes() / 1e6)
        peer.pause()
        started.append((system, peer))
    return started


def _taken(turns: Sequence[_Turn], rounds: int, results: Results) -> Iterator[_Turn]:
    """The turns that did not fail, when all have been taken."""
    failed = set()
    for index in range(rounds + 1):
        # Whoever is first in one round is last in another.
        order = [*turns[index % len(turns) :], *turns[: index % len(turns)]] if turns else []
        for turn in order:
            if id(turn) in failed:
                continue
            try:
                if index == 0:
                    turn.warm()
                else:
                    turn.take()
            except PeerFailed as failure:
                failed.add(id(turn))
                results.add(system=turn.system.name, **turn.point.figures(), error=str(failure))
    return (turn for turn in turns if id(turn) not in failed)


def _still_needed(
    started: Sequence[tuple[System, Peer]], points: Sequence[Point], *, always: System
) -> Iterator[tuple[System, Peer]]:
    """The systems that answer one of the points; the others are ended."""
    for system, peer in started:
        if system is always or any(system.runs(point) for point in points):
            yield system, peer
        else:
            peer.close()
