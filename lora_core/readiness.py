"""How far an adapter is from serving a request."""

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

M = TypeVar("M")


class Readiness(enum.Enum):
    """How far an adapter is from serving a request."""

    READY = "ready"
    """In a slot, fully written."""
    WRITING = "writing"
    """A slot is its own, and being written."""
    READING = "reading"
    """Its tensors are not in memory; they are being read, or will be in their turn."""
    SLOT_AVAILABLE = "slot available"
    """Its tensors are in memory, and a slot could be had."""
    NO_SLOT = "no slot"
    """Its tensors are in memory, and every slot is in use."""


@dataclass(frozen=True)
class Preparation(Generic[M]):
    """Where an adapter stands, and the slot it just got: the caller writes `tensors` there and calls `finish_write`.

    `is_new` says that there is now a read to begin, if memory has room.
    """

    readiness: Readiness
    is_new: bool = False
    slot: int | None = None
    tensors: M | None = None
