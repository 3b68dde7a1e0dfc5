"""What the router actor and the rest of the fleet tell one another: plain structs, no Ray.

`AdapterEntry` and `Change` belong to the desired state and live in `cluster.entry` and `cluster.changes`.
"""

from collections.abc import Callable

import msgspec

from cluster.changes import Change, Topic
from cluster.entry import AdapterEntry
from lora_core.portable import portable
from lora_core.types import LoadReport, LoRAResponse, LoRAStatus

ROUTER_ACTOR = "adapter_router"
"""Name of the router actor within its deployment, and its key in a replica's metadata."""


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica must apply before it takes requests; meanwhile it follows what comes after `epoch`."""

    epoch: int
    changes: list[Change]
    """Unloads of what the replica holds and should not, loads of what it lacks, pins; those of one name in order.

    They are acknowledged with the registration's `epoch`: each brings its name to where it is at that epoch.
    """
    router_name: str
    """The router actor's Ray name in namespace "serve"; empty outside Ray."""
    lease_s: float = 5.0
    """A replica silent for longer than this no longer counts; it waits for changes for less."""
    work_period_s: float = 1.0
    """How long a replica waits between two reports of its work, so that the router actor hears few enough a second."""

    def __reduce__(self) -> tuple[Callable[[bytes], "Registration"], tuple[bytes]]:
        # To pickle 100,000 changes one by one would keep the router actor busy for a second.
        return _unpacked_registration, (msgspec.msgpack.encode(self),)


def _unpacked_registration(packed: bytes) -> Registration:
    return msgspec.msgpack.decode(packed, type=Registration)


@portable
class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a change ended on one replica. Those of different names come in any order."""

    topic: Topic
    epoch: int
    """Of the change; of the registration for one that came with it."""
    response: LoRAResponse


@portable
class LoadOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a load, unload, pin or unpin ended over the whole fleet."""

    status: LoRAStatus
    message: str
    per_replica: dict[str, str] = {}
    """replica id -> its own words: its status and message."""
    epoch: int = 0
    """Epoch that a request must carry to see the change; 0 when nothing was changed."""
    report: LoadReport | None = None
    """Of a load that ended well: what is now served, and the time it took the slowest replica."""
    behind: list[str] = []
    """Replicas that do not serve the adapter yet, and are asked again, where the status is PARTIAL."""


@portable
class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """A change that a replica refused, and is asked for again."""

    reason: str
    """Its own words."""
    num_attempts: int
    """How often it has refused."""
    in_s: float
    """Seconds until it is asked again; 0 while it is being asked."""


@portable
class LastError(msgspec.Struct, frozen=True, kw_only=True):
    """What last went wrong, and when."""

    unix_s: float
    text: str


@portable
class AdapterInFleet(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter that can be asked for, in detail."""

    entry: AdapterEntry
    report: LoadReport | None
    """Of the load that made it what it is; None where it is not known."""
    replicas: dict[str, str]
    """Replica id -> where the adapter is ("slot", "host" memory, or only on "disk"), "loaded" while that is not known,
    "loading", or why that replica does not serve it."""
    retries: dict[str, Retry] = {}
    """Replica id -> when a replica that does not serve it is asked again."""


@portable
class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """What one live replica holds, of the adapters now served (other generations are left out)."""

    resident: frozenset[str] = frozenset()
    """Names in a slot."""
    in_memory: frozenset[str] = frozenset()
    """Names in host memory."""
    refused: frozenset[str] = frozenset()
    """Names of served adapters it could not load, or has yet to: a request for one cannot succeed there now. All others
    are loaded there."""
    num_slots: int = 0
    num_slots_used: int = 0
    """Slots taken by any generation, also by those being drained."""
    sequence: int = -1
    """Of the residency report this came from; -1 before the first, which a replica makes when it can be asked."""
    loading: frozenset[str] = frozenset()
    """Names on their way into a slot, by the replica's own word or by the router actor's asking."""
    load_ms_per_mib: dict[str, float] = {}
    """Measured: milliseconds to bring a MiB of adapter into a slot, by where it is ("host", "disk" or "remote")."""
    service_ms: float | None = None
    """Measured: what a request in flight makes another one wait; None while not known."""
    stalled: frozenset[str] = frozenset()
    """Names, `cluster.progress.BASE` for the base model's, whose oldest request there makes no progress: no more are
    sent to it until one does."""
    is_stalled: bool = False
    """Whether no request there makes progress: none are sent to it while another replica is there."""
    is_leaving: bool = False
    """Whether it gets no more requests, and ends with the last it has."""


@portable
class SlotWishes(msgspec.Struct, frozen=True, kw_only=True):
    """What the router actor wants of one replica's slots; holds until it says otherwise."""

    warm: list[str] = []
    """Names it should have in a slot, the most wanted first."""
    protected: list[str] = []
    """Further names whose slots requests of others should take last: the plan counts on them there."""
    version: int = 0
    """Rises with each change of what is wished of this replica."""


@portable
class Alias(msgspec.Struct, frozen=True, kw_only=True):
    """A name that stands for weighted adapters, as for a canary."""

    name: str
    targets: dict[str, float]
    """Adapter name -> its share of the alias's requests; the shares sum to 1."""
    epoch: int
    """Epoch of its last change."""


@portable
class AliasInFleet(msgspec.Struct, frozen=True, kw_only=True):
    """An alias, and where a rollback would lead."""

    alias: Alias
    before: list[Alias] = []
    """What it stood for earlier, the latest first: a rollback goes back to the first."""


@portable
class FleetTable(msgspec.Struct, frozen=True, kw_only=True):
    """One consistent view of the fleet; a higher version of the same router is newer."""

    version: int
    epoch: int
    adapters: dict[str, AdapterEntry]
    """Name -> entry, for adapters that can be asked for now (state "ready")."""
    replicas: dict[str, ReplicaState]
    """Replica id -> what it holds, for replicas whose lease is current."""
    router_id: str = ""
    """Changes when the router restarts; versions of different routers do not compare."""
    copies: dict[str, tuple[str, ...]] = {}
    """Name -> ids of the replicas its requests should go to, best first, for adapters that the plan (`cluster.copies`)
    gives more than one, or another than the first in rendezvous order."""
    aliases: dict[str, Alias] = {}

    @property
    def num_joined(self) -> int:
        """Replicas that take requests: a replica reports what it holds for the first time when it has joined."""
        return sum(state.sequence >= 0 and not state.is_leaving for state in self.replicas.values())
