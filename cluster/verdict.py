"""How a load or unload ended over the whole fleet, from what each replica answered."""

from collections.abc import Mapping

from lora_core.types import LoRAResponse, LoRAStatus

Answers = Mapping[str, LoRAResponse | None]
"""replica id -> its response; None where it acknowledged the change without one."""


def judge_load(name: str, answers: Answers, late: list[str], timeout_s: float) -> LoRAResponse | None:
    """Why a load failed; None where every replica has the adapter.

    Args:
        name: The adapter.
        answers: What the live replicas that acknowledged said.
        late: Live replicas that did not acknowledge within timeout_s.
        timeout_s: The `router.change_timeout_s` setting.
    """
    refusals = {r: answer for r, answer in sorted(answers.items()) if answer and answer.status != LoRAStatus.SUCCESS}
    silent = sorted(replica for replica, answer in answers.items() if answer is None)
    if refusals:
        return _joined(refusals, len(answers))
    if late:
        fault = f"no answer within {timeout_s:g} s (router.change_timeout_s) from replica(s) {', '.join(late)}"
    elif silent:
        fault = f"replica(s) {', '.join(silent)} acknowledged the change without saying how it went"
    elif not answers:
        fault = "every replica died meanwhile; try again once /health is ok"
    else:
        return None
    return LoRAResponse(LoRAStatus.LOAD_ERROR, f"adapter {name!r} was not loaded: {fault}")


def judge_unload(name: str, answers: Answers, late: list[str]) -> LoRAResponse:
    """How an unload ended. The adapter is no longer served in any case."""
    expected = (LoRAStatus.SUCCESS, LoRAStatus.UNLOAD_NAME_NONEXISTENT)
    faults = {r: answer for r, answer in sorted(answers.items()) if answer and answer.status not in expected}
    if faults:
        parts = "; ".join(f"{replica}: {text_of(answer)}" for replica, answer in faults.items())
        message = f"adapter {name!r} is no longer served, but its memory may not be free: {parts}"
        return LoRAResponse(LoRAStatus.UNLOAD_ERROR, message)
    waiting = f"; replica(s) {', '.join(late)} have yet to drop it" if late else ""
    return LoRAResponse(LoRAStatus.SUCCESS, f"adapter {name!r} is unloaded{waiting}")


def words(answers: Answers) -> dict[str, str]:
    """Each replica's status and message in one line."""
    return {
        replica: "no answer" if answer is None else f"{answer.status.value}: {text_of(answer)}"
        for replica, answer in answers.items()
    }


def text_of(response: LoRAResponse) -> str:
    """A response's message as one text."""
    return response.message if isinstance(response.message, str) else "; ".join(response.message)


def _joined(refusals: Mapping[str, LoRAResponse], num_answers: int) -> LoRAResponse:
    """One response for all refusals: their common text, or each replica's own."""
    texts = {text_of(answer) for answer in refusals.values()}
    status = next(iter(refusals.values())).status
    if len(texts) == 1 and len(refusals) == num_answers:
        return LoRAResponse(status, texts.pop())
    parts = "; ".join(f"{replica}: {text_of(answer)}" for replica, answer in refusals.items())
    return LoRAResponse(status, f"{len(refusals)} of {num_answers} replicas refused: {parts}")
