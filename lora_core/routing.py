"""From a batch sorted by adapter to the routing triple: which token rows use which slot."""

from collections.abc import Sequence
from typing import Protocol

from lora_core.types import AdapterRef


class RoutedRequest(Protocol):
    """What routing needs to know of a request."""

    @property
    def adapter(self) -> AdapterRef | None:
        """The adapter the request decodes through; None for the base model."""
        ...


def routing_triple(slots_and_tokens: Sequence[tuple[int | None, int]]) -> tuple[list[int], list[int], int]:
    """Group a sorted batch by slot and cut it at the first base request.

    Semantics: runs of equal slot form groups; group g covers token rows `grouped_offsets[g]:grouped_offsets[g + 1]`
    and uses slot `lora_ids[g]`; `end = grouped_offsets[-1]` rows carry LoRA, and the rows after it are base rows.

    Args:
        slots_and_tokens: For each request, in row order, its adapter's slot (None for a base request) and how many
            token rows it has in this step.

    Returns:
        `(lora_ids, grouped_offsets, end)`, with one more offset than ids.

    Raises:
        ValueError: an adapter's request follows a base request (cutting there would answer it with the base model), or
            a token count is negative.
    """
    lora_ids: list[int] = []
    grouped_offsets = [0]
    in_base_rows = False
    for slot, tokens in slots_and_tokens:
        if tokens < 0:
            raise ValueError(f"a request has {tokens} token rows, expected 0 or more")
        if slot is None:
            in_base_rows = True
        elif in_base_rows:
            raise ValueError(f"a request of slot {slot} follows a base request; sort the batch with sort_lora_batch")
        elif lora_ids and lora_ids[-1] == slot:
            grouped_offsets[-1] += tokens
        else:
            lora_ids.append(slot)
            grouped_offsets.append(grouped_offsets[-1] + tokens)
    return lora_ids, grouped_offsets, grouped_offsets[-1]
