"""How a change of an adapter ended over the whole fleet, from what each replica answered."""

from collections.abc import Mapping
from typing import NamedTuple

from cluster.fleet import LoadOutcome
from lora_core.errors import LoRAFleetError, RouterReplaced
from lora_core.types import LoadReport, LoRAResponse, LoRAStatus

SHOWN_HASH = 12
"""Digits of a content hash that a message shows."""

FAULTS_OF_REPLICAS = frozenset(
    {LoRAStatus.UNAVAILABLE, LoRAStatus.LOAD_INVALID_PATH, LoRAStatus.LOAD_ERROR, LoRAStatus.UNSPECIFIED_ERROR}
)
"""What a load may fail with on one replica without the adapter being wrong: the replica's engine is away or late, the
files are not there, or cannot be read or held there. All other refusals are of the adapter."""

Answers = Mapping[str, LoRAResponse]
"""replica id -> its response; those that have yet to answer are left out."""


class LoadVerdict(NamedTuple):
    """How a load ended."""

    refusal: LoRAResponse | None
    """Why it failed and is to be undone; None where the adapter is served."""
    behind: dict[str, str]
    """Replica id -> why it has yet to serve the adapter, where others do."""


def judge_load(name: str, answers: Answers, late: list[str], timeout_s: float) -> LoadVerdict:
    """Whether an adapter is served, and where not yet.

    It is served where a replica has it, all that have it have the same, and no other has a fault to find with it.

    Args:
        name: The adapter.
        answers: What the live replicas that acknowledged said.
        late: Live replicas that did not acknowledge within timeout_s.
        timeout_s: The `router.change_timeout_s` setting.
    """
    failed = failures(answers)
    if len(failed) == len(answers) or any(answer.status not in FAULTS_OF_REPLICAS for answer in failed.values()):
        return LoadVerdict(judge_staging(name, answers, late, timeout_s), {})
    refusal = _judge_content(name, answers)
    if refusal is not None:
        return LoadVerdict(refusal, {})
    behind = {replica: text_of(answer) for replica, answer in failed.items()}
    return LoadVerdict(None, {**behind, **dict.fromkeys(late, f"no answer within {_limit(timeout_s)} yet")})


def judge_staging(name: str, answers: Answers, late: list[str], timeout_s: float) -> LoRAResponse | None:
    """Why not every replica has an adapter, and the same one, as before all are to swap; None where they have.

    Takes what `judge_load` takes.
    """
    refusals = failures(answers)
    if refusals:
        return _joined(refusals, len(answers))
    if late:
        fault = f"no answer within {_limit(timeout_s)} from replica(s) {', '.join(late)}"
    elif not answers:
        fault = "every replica died meanwhile; try again once /v1/fleet shows one"
    else:
        return _judge_content(name, answers)
    return LoRAResponse(LoRAStatus.UNAVAILABLE, f"adapter {name!r} was not loaded: {fault}")


def refused(error: LoRAFleetError, statuses: Mapping[type[LoRAFleetError], LoRAStatus]) -> LoadOutcome:
    """How a change ended that was refused before any replica heard of it; particular kinds come first in `statuses`.

    Raises:
        RouterReplaced: where that is why. Whoever asked finds the other router, and asks that one.
    """
    if isinstance(error, RouterReplaced):
        raise error
    status = next((status for kind, status in statuses.items() if isinstance(error, kind)), None)
    return LoadOutcome(status=status or LoRAStatus.UNSPECIFIED_ERROR, message=str(error))


def failures(answers: Answers) -> dict[str, LoRAResponse]:
    """The answers that are no success, in the order of the replicas' ids."""
    return {r: answer for r, answer in sorted(answers.items()) if answer.status is not LoRAStatus.SUCCESS}


def told(name: str, done: str, num_done: int, behind: Mapping[str, str]) -> str:
    """What became of an adapter on the replicas, in words."""
    if not behind:
        return f"adapter {name!r} is {done} on {num_done} replica(s)"
    parts = "; ".join(f"{replica} does not serve it ({reason})" for replica, reason in behind.items())
    return (
        f"adapter {name!r} is {done} on {num_done} of {num_done + len(behind)} replicas: {parts}; "
        "it is asked again in the background"
    )


def reports_of(answers: Answers) -> dict[str, LoadReport]:
    """What the replicas that loaded an adapter found, by replica id."""
    return {r: answer.report for r, answer in sorted(answers.items()) if answer.report is not None}


def slowest(answers: Answers) -> LoadReport | None:
    """The report of the replica that took longest, and so of how long the fleet took; None where there is none."""
    return max(reports_of(answers).values(), key=lambda report: sum(report.phases_s.values()), default=None)


def other_content(name: str, expected: str, found: str) -> LoRAResponse:
    """What is said of a replica that loaded other content than its fellows."""
    return LoRAResponse(
        LoRAStatus.LOAD_INVALID_ADAPTER,
        f"adapter {name!r} has other content here ({_shown(found)}) than on the replicas that serve it "
        f"({_shown(expected)}); put the same files on every node, and load it again",
    )


def behind_swap(answers: Answers, late: list[str]) -> dict[str, str]:
    """Replica id -> why it has yet to swap. That is not undone: every replica had the new content before."""
    reasons = {replica: text_of(answer) for replica, answer in failures(answers).items()}
    return {**reasons, **dict.fromkeys(late, "it has yet to swap")}


def judge_pin(name: str, answers: Answers, late: list[str], timeout_s: float) -> LoRAResponse | None:
    """Why a pin or unpin failed; None where every replica that serves the adapter has done it.

    A replica that does not serve the adapter has nothing to pin.
    """
    passed = (LoRAStatus.SUCCESS, LoRAStatus.PIN_NAME_NONEXISTENT)
    refusals = {r: answer for r, answer in sorted(answers.items()) if answer.status not in passed}
    if refusals:
        return _joined(refusals, len(answers))
    if late:
        fault = f"no answer within {_limit(timeout_s)} from replica(s) {', '.join(late)}"
    elif all(answer.status is LoRAStatus.PIN_NAME_NONEXISTENT for answer in answers.values()):
        fault = "no replica serves it now; try again once /v1/fleet shows one"
    else:
        return None
    return LoRAResponse(LoRAStatus.UNAVAILABLE, f"adapter {name!r}: {fault}")


def judge_unload(name: str, answers: Answers, late: list[str]) -> LoRAResponse:
    """How an unload ended. The adapter is no longer served in any case."""
    expected = (LoRAStatus.SUCCESS, LoRAStatus.UNLOAD_NAME_NONEXISTENT)
    faults = {r: answer for r, answer in sorted(answers.items()) if answer.status not in expected}
    if faults:
        parts = "; ".join(f"{replica}: {text_of(answer)}" for replica, answer in faults.items())
        message = f"adapter {name!r} is no longer served, but its memory may not be free: {parts}"
        return LoRAResponse(LoRAStatus.UNLOAD_ERROR, message)
    waiting = f"; replica(s) {', '.join(late)} have yet to drop it" if late else ""
    return LoRAResponse(LoRAStatus.SUCCESS, f"adapter {name!r} is unloaded{waiting}")


def words(answers: Answers) -> dict[str, str]:
    """Each replica's status and message in one line."""
    return {replica: f"{answer.status.value}: {text_of(answer)}" for replica, answer in answers.items()}


def text_of(response: LoRAResponse) -> str:
    """A response's message as one text."""
    return response.message if isinstance(response.message, str) else "; ".join(response.message)


def _judge_content(name: str, answers: Answers) -> LoRAResponse | None:
    """Refuse content that differs between replicas; those that name no hash are taken at their word."""
    holders: dict[str, list[str]] = {}
    for replica, report in reports_of(answers).items():
        holders.setdefault(report.content_hash, []).append(replica)
    if len(holders) < 2:
        return None
    parts = "; ".join(f"{_shown(found)} on {', '.join(replicas)}" for found, replicas in holders.items())
    return LoRAResponse(
        LoRAStatus.LOAD_INVALID_ADAPTER,
        f"adapter {name!r} was not loaded: its content differs between replicas ({parts}); "
        "put the same files on every node, and load it again",
    )


def _shown(content_hash: str) -> str:
    return content_hash[:SHOWN_HASH]


def _joined(refusals: Mapping[str, LoRAResponse], num_answers: int) -> LoRAResponse:
    """One response for all refusals: their common text, or each replica's own.

    Its status is the first one's that has looked at the adapter: trying again would meet that refusal, too.
    """
    texts = {text_of(answer) for answer in refusals.values()}
    status = min((answer.status for answer in refusals.values()), key=lambda status: status is LoRAStatus.UNAVAILABLE)
    if len(texts) == 1 and len(refusals) == num_answers:
        return LoRAResponse(status, texts.pop())
    parts = "; ".join(f"{replica}: {text_of(answer)}" for replica, answer in refusals.items())
    return LoRAResponse(status, f"{len(refusals)} of {num_answers} replicas refused: {parts}")


def _limit(timeout_s: float) -> str:
    return f"{timeout_s:g} s (router.change_timeout_s)"
