"""`Broadcast`: brings a change to every live replica, and their answers back."""

import asyncio
import time
from collections.abc import Callable, Mapping

from cluster.changes import Change, Topic, topic_of
from cluster.members import Members
from cluster.verdict import Answers
from deployments.bell import Bell
from lora_core.types import LoRAResponse

PAUSE_S = 2e-5
"""Pause between two looks at the answers for each one that is missing."""


class Broadcast:
    """A change is waited for, where somebody does, until every live replica has answered it, or for `timeout_s`.

    Args:
        members: The live replicas.
        progress: Rung whenever a replica has acknowledged something, came or went.
        announce: Wakes replicas that wait for changes, and handles that wait for the table.
        timeout_s: The setting `router.change_timeout_s`.
        is_resumed: Whether there may be replicas that a router before this one knew.
    """

    def __init__(
        self, members: Members, progress: Bell, announce: Callable[[], None], timeout_s: float, *, is_resumed: bool
    ) -> None:
        self._members = members
        self._progress = progress
        self.announce = announce
        self.timeout_s = timeout_s
        self._is_resumed = is_resumed
        self._back_by = time.monotonic() + members.lease_s

    async def answered(self, change: Change) -> tuple[Answers, list[str]]:
        """Send a change, which has just been recorded; what the live replicas it is for answered, and those that did
        not in time."""
        deadline = time.monotonic() + self.timeout_s
        topic = topic_of(change.request)
        with self._members.asked(topic):
            self.announce()
            while True:
                told = [member for member in self._members.live if change.is_for(member.replica_id)]
                answers = {member.replica_id: member.response(topic, change.epoch) for member in told}
                late = [replica for replica, answer in answers.items() if answer is None]
                if not late or not await self._progress.wait(deadline - time.monotonic()):
                    return _given(answers), late
                # Many answer at nearly the same time: looking after each would cost their number squared.
                await asyncio.sleep(len(late) * PAUSE_S)

    def answers(self, topic: Topic, epoch: int) -> Answers:
        """What live replicas have answered to the change of `epoch`, or to a later one of the topic."""
        return _given({member.replica_id: member.response(topic, epoch) for member in self._members.live})

    async def members_are_back(self) -> bool:
        """Whether a replica is live; for a lease after the start, replicas get the time to come.

        Those of a router before this one are all waited for: who has yet to come back serves requests meanwhile, and
        what is said of the others would not hold of it. Where there was none, the first one will do.
        """
        while self._is_resumed or not self._members.live:
            if not await self._progress.wait(self._back_by - time.monotonic()):
                break
        return bool(self._members.live)


def _given(answers: Mapping[str, LoRAResponse | None]) -> Answers:
    return {replica: answer for replica, answer in answers.items() if answer is not None}
