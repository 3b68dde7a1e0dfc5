"""What an engine has done and has to do: its word to whoever places requests, and to the operator."""

import msgspec

from lora_core.portable import portable


@portable
class AdapterWork(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The requests of one adapter, all its generations together, or of the base model."""

    name: str | None = None
    """None is the base model."""
    num_tokens: int = 0
    """Computed in the time reported on, of prompts and answers; again where a request that was stopped went on."""
    num_started: int = 0
    """Requests that began to run for the first time in that time."""
    wait_s: float = 0.0
    """How long those had waited for it, together."""
    num_running: int = 0
    """Now."""
    num_waiting: int = 0
    """Now: for a seat, KV blocks, a slot, or the compilation of their constraint."""
    oldest_age_s: float = 0.0
    """How long the oldest of them has been there."""
    oldest_idle_s: float = 0.0
    """How long ago the oldest came nearer to its end; since it came, where it never has."""
    oldest_waits: bool = False
    """Whether the oldest is one of those that wait."""


@portable
class SlotCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of adapters and slots since the engine's start."""

    num_hits: int = 0
    """Requests whose adapter was in a slot when they came."""
    num_misses: int = 0
    """Requests whose adapter was not."""
    num_evictions: int = 0
    """Adapters that lost their slot to another."""
    num_loads: dict[str, int] = {}
    """Slots written, by where the adapter was before ("host" or "disk"); downloads of adapters as "remote"."""
    load_s: dict[str, float] = {}
    """Seconds of those, added up; from "disk" the read is included."""


@portable
class CacheCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How full the KV cache is, and what came of it since the engine's start."""

    usage: float = 0.0
    """Share of its blocks that requests hold now; blocks that are kept in case somebody needs them again are free."""
    num_queried_tokens: int = 0
    """Prompt tokens looked for in it."""
    num_hit_tokens: int = 0
    """How many of them were there."""
    num_preemptions: int = 0
    """Requests that had to wait again for want of blocks, or of their adapter's turn in a slot."""


@portable
class Workload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="workload"):
    """What an engine has done in the last `seconds`, and has to do now.

    The engine process tells it a few times a second, and the replica passes it on to the router actor, less often and
    with nothing lost: see `after`.
    """

    seconds: float = 0.0
    adapters: list[AdapterWork] = []
    """Those with requests now, or with tokens in this time."""
    load_ms_per_mib: dict[str, float] = {}
    """Measured: milliseconds to bring a MiB of adapter into a slot, by where it is: "host", "disk" or "remote"."""
    service_ms: float | None = None
    """Measured: what a request in flight makes another one wait; None while not known."""
    slots: SlotCounts = SlotCounts()
    cache: CacheCounts = CacheCounts()
    silent_s: float = 0.0
    """How long before this was passed on the engine said it; the ages include it."""
    stalled: dict[str, str] = {}
    """Set by the replica: adapters ("" is the base model) whose oldest request makes no progress, and why."""
    fault: str = ""
    """Set by the replica: why none of its requests makes progress; empty while some do."""
    is_leaving: bool = False
    """Set by the replica: it gets no more requests, and ends with the last it has."""

    def after(self, earlier: "Workload") -> "Workload":
        """One account of two successive times: what was done in both, and the rest as it is now."""
        then, now = ({work.name: work for work in part.adapters} for part in (earlier, self))
        joined = [_joined(work, then.get(work.name, _NOTHING)) for work in self.adapters]
        gone = [work for name, work in then.items() if name not in now]
        ended = [_done(work) for work in gone if work.num_tokens or work.num_started]
        return msgspec.structs.replace(self, seconds=earlier.seconds + self.seconds, adapters=joined + ended)

    def told(self) -> "Workload":
        """What is left of this account once it has been told: what is to be done."""
        waiting = [work for work in self.adapters if work.num_running + work.num_waiting]
        left = [msgspec.structs.replace(work, num_tokens=0, num_started=0, wait_s=0.0) for work in waiting]
        return msgspec.structs.replace(self, seconds=0.0, adapters=left)

    def later(self, silent_s: float) -> "Workload":
        """The same, passed on so much later: whoever waits has waited longer."""
        adapters = [_aged(work, silent_s) for work in self.adapters]
        return msgspec.structs.replace(self, adapters=adapters, silent_s=self.silent_s + silent_s)


_NOTHING = AdapterWork()


def _joined(now: AdapterWork, then: AdapterWork) -> AdapterWork:
    return msgspec.structs.replace(
        now,
        num_tokens=then.num_tokens + now.num_tokens,
        num_started=then.num_started + now.num_started,
        wait_s=then.wait_s + now.wait_s,
    )


def _done(then: AdapterWork) -> AdapterWork:
    return AdapterWork(name=then.name, num_tokens=then.num_tokens, num_started=then.num_started, wait_s=then.wait_s)


def _aged(work: AdapterWork, by_s: float) -> AdapterWork:
    if not work.num_running + work.num_waiting:
        return work
    return msgspec.structs.replace(work, oldest_age_s=work.oldest_age_s + by_s, oldest_idle_s=work.oldest_idle_s + by_s)
