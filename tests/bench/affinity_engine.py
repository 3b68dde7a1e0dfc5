"""An engine process that takes as long to load its tiny adapters as it would for those of a model of 70B parameters.

The answers, the slots and the memory are real; what is added is time: a read from disk and a copy into a slot last as
long as the bytes of the real adapter take at the measured rates. Like a device's copies they keep no processor busy.
"""

import os
import time
from pathlib import Path
from typing import Any

from deployments import engine_process
from lora_core.adapter_reader import AdapterReader
from lora_core.adapter_record import AdapterRecord
from lora_core.inputs import LoRAInputs
from lora_core.model import LoRAModel

REAL_BYTES_PER_RANK = 2 * 80 * (16_384 + 2 * 9_216 + 16_384 + 3 * 36_864)
"""Of an adapter of all linear layers of Llama-3-70B in 16 bits: 80 layers, the widths in and out of each projection."""

DISK_BYTES_PER_S, SLOT_BYTES_PER_S = 2.0e9, 11.5e9
"""From disk to host memory, and from there to a slot, as `make bench-load` measured."""


def real_bytes(rank: int) -> int:
    """Size of the adapter that one of this rank stands for."""
    return rank * REAL_BYTES_PER_RANK


class TimedReader(AdapterReader):
    """Reads in the time that the real adapter takes."""

    def read(self, name: str, path: Path) -> tuple[AdapterRecord, LoRAModel]:
        began_s = time.monotonic()
        record, tensors = super().read(name, path)
        left_s = real_bytes(record.rank) / DISK_BYTES_PER_S - (time.monotonic() - began_s)
        time.sleep(max(0.0, left_s))
        return record, tensors


class TimedWrite:
    """A slot's write that is complete when the real one would be."""

    def __init__(self, write: Any, seconds: float) -> None:
        self._write = write
        self._is_written = False
        self._due_s = time.monotonic() + seconds

    def advance(self, budget_s: float | None) -> bool:
        """Write on; without a budget, wait for the end."""
        self._is_written = self._is_written or self._write.advance(budget_s)
        left_s = self._due_s - time.monotonic()
        if budget_s is None and left_s > 0:
            time.sleep(left_s)
            left_s = 0.0
        return self._is_written and left_s <= 0


class TimedInputs(LoRAInputs):
    """Writes slots in the time that the real adapter takes."""

    def begin_write(self, slot: int, adapter: Any) -> Any:
        return TimedWrite(super().begin_write(slot, adapter), real_bytes(adapter.rank) / SLOT_BYTES_PER_S)


if __name__ == "__main__":
    # The manager makes both when the engine is made.
    import lora_core.manager

    setattr(lora_core.manager, "AdapterReader", TimedReader)  # noqa: B010 (no name of its own is exported)
    setattr(lora_core.manager, "LoRAInputs", TimedInputs)  # noqa: B010
    os._exit(engine_process.main())
