"""`SlotClaims`: pins and least copies, what operators may claim of the fleet's slots."""

from collections.abc import Mapping

from cluster.changes import Topic
from cluster.entry import AdapterEntry
from cluster.fleet import LoadOutcome
from cluster.members import Members
from cluster.registry import AdapterRegistry
from cluster.verdict import failures, judge_pin, refused, text_of, words
from deployments.broadcast import Broadcast
from deployments.turns import Turns
from lora_core.errors import AdapterError, AdapterNotFound, EngineError, InvalidRequest, LoRAFleetError
from lora_core.types import LoRAResponse, LoRAStatus

PIN_STATUSES: Mapping[type[LoRAFleetError], LoRAStatus] = {
    AdapterNotFound: LoRAStatus.PIN_NAME_NONEXISTENT,
    AdapterError: LoRAStatus.PIN_ERROR,
}
"""What a refusal of a pin or unpin before any replica hears of it is answered as."""


class SlotClaims:
    """Changes which adapters have slots by an operator's wish. One slot of each replica always stays for the others.

    Args:
        registry: The desired adapters.
        members: The live replicas.
        broadcast: Brings changes to them.
        turns: Of the operations on each name.
        num_slots: Adapter slots of each replica; None: as the replicas report.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        members: Members,
        broadcast: Broadcast,
        turns: Turns,
        num_slots: int | None,
    ) -> None:
        self._registry = registry
        self._members = members
        self._broadcast = broadcast
        self._turns = turns
        self._num_slots = num_slots

    async def set_pin(self, name: str, pinned: bool) -> LoadOutcome:
        """Pin or unpin an adapter on every replica; a pin that one refuses is taken back from all."""
        async with self._turns.turn(name):
            await self._broadcast.members_are_back()
            done = "pinned" if pinned else "no longer pinned"
            try:
                if pinned:
                    self._check_total(name, pins=1)
                change = self._registry.set_pin(name, pinned, self._most_pins())
            except LoRAFleetError as error:
                return refused(error, PIN_STATUSES)
            if change is None:
                return await self._ask_those_behind(name, done)
            answers, late = await self._broadcast.answered(change)
            refusal = judge_pin(name, answers, late, self._broadcast.timeout_s)
            if refusal is None:
                message = f"adapter {name!r} is {done} on {len(answers)} replica(s)"
                return LoadOutcome(status=LoRAStatus.SUCCESS, message=message, per_replica=words(answers))
            if pinned:
                refusal = await self._take_pin_back(name, refusal)
            return LoadOutcome(status=refusal.status, message=text_of(refusal), per_replica=words(answers))

    async def _ask_those_behind(self, name: str, done: str) -> LoadOutcome:
        """Answer a pin or unpin that changes nothing. Joined replicas that have not done it are asked again."""
        topic, message = Topic(name, is_pin=True), f"adapter {name!r} is {done} already"
        # Whenever it was asked for.
        answers = self._broadcast.answers(topic, epoch=0)
        done_on = answers.keys() - failures(answers)
        behind = [
            member.replica_id
            for member in self._members.live
            # One that starts does it before it has joined, or refuses.
            if member.replica_id not in done_on and (member.replica_id in answers or member.residency is not None)
        ]
        if not behind:
            return LoadOutcome(status=LoRAStatus.SUCCESS, message=message, per_replica=words(answers))
        again, late = await self._broadcast.answered(self._registry.repeat_pin(name, behind))
        answers = {**answers, **again}
        refusal = judge_pin(name, answers, late, self._broadcast.timeout_s)
        if refusal is not None:
            message = f"{message}, but not everywhere: {text_of(refusal)}"
        status = LoRAStatus.SUCCESS if refusal is None else refusal.status
        return LoadOutcome(status=status, message=message, per_replica=words(answers))

    async def set_min_copies(self, name: str, min_copies: int) -> AdapterEntry:
        """Have an adapter in a slot of at least so many replicas.

        Raises:
            AdapterNotFound: no such adapter.
            InvalidRequest: more than there are replicas, or slots to give; the numbers are named.
            EngineError: no replica is there to hold it.
        """
        async with self._turns.turn(name):
            if min_copies < 1:
                raise InvalidRequest(f"min_copies is {min_copies}; expected at least 1")
            await self._broadcast.members_are_back()
            num_replicas = len(self._members.live)
            if min_copies > 1 and not num_replicas:
                raise EngineError("no replica is running, so none can hold a copy; try again once /v1/fleet shows one")
            if min_copies > max(1, num_replicas):
                raise InvalidRequest(
                    f"min_copies of adapter {name!r} is {min_copies}, and there are {num_replicas} replica(s); "
                    "each holds one copy: ask for fewer, or raise the number of replicas"
                )
            entry = self._registry.served.get(name)
            if min_copies > 1 and entry is not None and min_copies > entry.min_copies:
                self._check_total(name, copies=min_copies)
            return self._registry.set_min_copies(name, min_copies)

    def _check_total(self, name: str, *, pins: int = 0, copies: int = 0) -> None:
        """Refuse what would claim more slots than there are, with the numbers. Raises AdapterError, InvalidRequest."""
        num_slots, replicas = self._slots_per_replica(), len(self._members.live)
        if num_slots is None or not replicas:
            return
        others = [entry for other, entry in self._registry.served.items() if other != name]
        asked = copies + sum(entry.min_copies for entry in others if entry.min_copies > 1 and not entry.pinned)
        pinned = pins + sum(entry.pinned for entry in others)
        room = replicas * (num_slots - 1)
        if asked and pinned * replicas + asked > room:
            kind = AdapterError if pins else InvalidRequest
            raise kind(
                f"adapter {name!r}: {pinned} pinned adapter(s) on {replicas} replica(s) and {asked} least copies would "
                f"take {pinned * replicas + asked} slots, and at most {room} can be claimed ({num_slots} slots a "
                "replica, one stays free for the others); unpin, ask for fewer copies, or raise max_num_loras"
            )

    async def _take_pin_back(self, name: str, refusal: LoRAResponse) -> LoRAResponse:
        try:
            back = self._registry.set_pin(name, False)
        except LoRAFleetError as error:
            return LoRAResponse(refusal.status, f"{text_of(refusal)}; the pin stays where it was possible: {error}")
        if back is not None:
            await self._broadcast.answered(back)
        return refusal

    def _slots_per_replica(self) -> int | None:
        reported = [member.num_slots for member in self._members.live if member.num_slots]
        return self._num_slots if self._num_slots is not None else min(reported, default=None)

    def _most_pins(self) -> int | None:
        num_slots = self._slots_per_replica()
        return None if num_slots is None else num_slots - 1
