"""What HTTP answers say of one adapter beside OpenAI's own fields: its load report, and its state in the fleet."""

from typing import Any

import msgspec

from cluster.fleet import AdapterInFleet, LoadOutcome
from lora_core.types import LoadReport

SHOWN_MODULES = 4
"""Modules that a warning names; the report lists them all."""


def outcome_body(outcome: LoadOutcome, vllm_message: str | None = None) -> dict[str, Any]:
    """A change: what was done, each replica's own words, those that have yet to follow, and what a load found.

    Args:
        outcome: How it ended.
        vllm_message: All that vLLM answers to the same, for scripts that look for these words.
    """
    body: dict[str, Any] = {
        "status": outcome.status.value,
        "message": outcome.message,
        "replicas": outcome.per_replica,
    }
    if vllm_message is not None:
        body["vllm_message"] = vllm_message
    if outcome.behind:
        body["behind"] = outcome.behind
    return body if outcome.report is None else {**body, "report": report_body(outcome.report)}


def status_body(status: AdapterInFleet) -> dict[str, Any]:
    """The `lora` field of GET /v1/models/{adapter}."""
    entry = status.entry
    return {
        "generation": entry.generation,
        "content_hash": entry.content_hash,
        "pinned": entry.pinned,
        "min_copies": entry.min_copies,
        "replicas": status.replicas,
        "retries": msgspec.to_builtins(status.retries),
        "report": None if status.report is None else report_body(status.report),
    }


def report_body(report: LoadReport) -> dict[str, Any]:
    """The fields of `LoadReport`, and a sentence for each thing its reader should know."""
    fields = {name: getattr(report, name) for name in report.__struct_fields__}
    body: dict[str, Any] = msgspec.to_builtins(fields, str_keys=True)
    return {**body, "warnings": warnings(report)}


def warnings(report: LoadReport) -> list[str]:
    """Sentences on modules that change nothing."""
    count, total = len(report.noop_modules), report.num_modules
    if not count:
        return []
    if report.is_noop:
        return [
            f"this adapter changes nothing: on a fixed input the output of each of its {total} modules is the base's; "
            "was it saved before it was trained?"
        ]
    shown = ", ".join(report.noop_modules[:SHOWN_MODULES]) + (", ..." if count > SHOWN_MODULES else "")
    return [f"{count} of {total} modules change nothing: on a fixed input their output is the base's ({shown})"]
