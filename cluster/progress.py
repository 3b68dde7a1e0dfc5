"""Whether a replica's requests get anywhere: a judge of signs of life, with no clock of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lora_core.workload import AdapterWork

BASE = ""
"""Stands for the base model among names of adapters."""

MOST_HEALS = 2
"""An adapter that stalls again after so many heals is not what is at fault: its replica is."""

RELAPSE_DEADLINES = 10
"""A heal counts against an adapter for this many of its deadlines."""


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Longest times without progress, in seconds; `cluster.schema.WatchdogSettings` describes them."""

    adapter_s: float
    waiting_s: float
    replica_s: float


class Sign(NamedTuple):
    """How the oldest unfinished request of an adapter, or of the base model, fares on one replica."""

    idle_s: float
    """Since it last came nearer to its end, or since it came."""
    waits: bool = False
    """Whether it waits, in the engine's queue, for a seat, a slot, KV blocks, or its adapter's files."""


class Verdict(NamedTuple):
    """What is stalled now, each with a sentence that says why."""

    adapters: Mapping[str, str]
    """Names that get no requests here: those just found stalled, and those being healed."""
    to_heal: tuple[str, ...]
    """Those just found: their requests are to be ended, and the adapters loaded anew."""
    replica: str | None
    """Why the whole replica is to be replaced; None while it is not."""


def signs(open_s: Mapping[str, float], work: Mapping[str, AdapterWork]) -> dict[str, Sign]:
    """What a replica and its engine know together.

    A request is seen by the replica from the call to its last token, and by the engine from when it arrives there. Of
    one that neither runs nor waits in the engine only the replica knows; that it computes its prompt, only the engine.

    Args:
        open_s: For each name with unanswered requests, seconds since the oldest of them got a token, or came.
        work: What the engine last said, by name.
    """
    found = {name: Sign(idle_s) for name, idle_s in open_s.items()}
    for name, told in work.items():
        if told.num_running + told.num_waiting:
            idle_s = min(told.oldest_idle_s, open_s.get(name, told.oldest_idle_s))
            found[name] = Sign(idle_s, waits=told.oldest_waits or told.num_running == 0)
    return found


class ProgressWatch:
    """Judges one replica. All times are seconds on one clock of the caller's choice.

    An adapter whose oldest request has passed its deadline is stalled until its requests there are gone, or have
    progressed since. The replica is stalled when no request of any adapter has progressed within its deadline, when an
    adapter stalls again soon after `MOST_HEALS` heals, or when a heal takes longer than the replica's deadline; then it
    stays so.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._healing: dict[str, tuple[float, str]] = {}
        self._healed_at: dict[str, list[float]] = {}
        self._replica: str | None = None

    def judge(self, now_s: float, found: Mapping[str, Sign]) -> Verdict:
        """The state of things, given a sign for each name that has unfinished requests."""
        self._note_healed(now_s, found)
        stalled = {
            name: why
            for name, sign in found.items()
            if name not in self._healing and (why := self._adapter_fault(name, sign)) is not None
        }
        if self._replica is None:
            self._replica = self._replica_fault(now_s, found, stalled)
        if self._replica is not None:
            # Nothing smaller than the replica is worth healing now.
            stalled = {}
        self._healing.update({name: (now_s, why) for name, why in stalled.items()})
        adapters = {name: why for name, (_, why) in self._healing.items()}
        return Verdict(adapters, tuple(sorted(stalled)), self._replica)

    def _note_healed(self, now_s: float, found: Mapping[str, Sign]) -> None:
        for name, (since_s, _) in list(self._healing.items()):
            sign = found.get(name)
            if sign is None or sign.idle_s < now_s - since_s:
                del self._healing[name]
                self._healed_at.setdefault(name, []).append(now_s)

    def _adapter_fault(self, name: str, sign: Sign) -> str | None:
        limit_s = self._deadlines.waiting_s if sign.waits else self._deadlines.adapter_s
        if sign.idle_s <= limit_s:
            return None
        setting = "waiting_deadline_s" if sign.waits else "adapter_deadline_s"
        what = "the base model" if name == BASE else f"adapter {name!r}"
        return (
            f"{what}: its oldest request has made no progress for {sign.idle_s:.1f} s "
            f"(watchdog.{setting} is {limit_s:g})"
        )

    def _replica_fault(self, now_s: float, found: Mapping[str, Sign], stalled: Mapping[str, str]) -> str | None:
        limit_s = self._deadlines.replica_s
        idle_s = min((sign.idle_s for sign in found.values()), default=0.0)
        if idle_s > limit_s:
            return (
                f"no request has made progress for {idle_s:.1f} s (watchdog.replica_deadline_s is {limit_s:g}), "
                "though the engine process lives"
            )
        for name, why in stalled.items():
            since_s = now_s - RELAPSE_DEADLINES * self._deadlines.adapter_s
            heals = [healed_s for healed_s in self._healed_at.get(name, ()) if healed_s >= since_s]
            self._healed_at[name] = heals
            if len(heals) >= MOST_HEALS:
                return f"{why}, and so it was before {len(heals)} heals"
        for since_s, why in self._healing.values():
            if now_s - since_s > limit_s:
                return f"{why}, and ending its requests did not help within {limit_s:g} s"
        return None
