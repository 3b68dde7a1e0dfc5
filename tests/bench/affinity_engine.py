"""An engine process that is as slow as a device with a large model, and as slow to load its tiny adapters.

The answers, the slots and the memory are real; what is added is time, in which no processor is busy, as with a device:

- a step takes `STEP_S`, whatever is in it, so that a machine of two cores has several such engines;
- an adapter's bytes, those of the real one that it stands for, come from disk and go into slots at measured rates.
  There is one disk and one bus: who comes first has it, and two loads at once take twice as long.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

from deployments import engine_process
from lora_core.adapter_reader import AdapterReader
from lora_core.adapter_record import AdapterRecord
from lora_core.engine.engine import LLMEngine
from lora_core.engine.request import ScheduledBatch
from lora_core.inputs import LoRAInputs
from lora_core.model import LoRAModel

MODEL_VARIABLE = "LORA_FLEET_BENCH_MODEL"
"""Whose adapters the tiny ones stand for, a key of `BYTES_PER_RANK`; for the processes that Ray starts."""

BYTES_PER_RANK = {
    "8b": 2 * 32 * (8_192 + 2 * 5_120 + 8_192 + 3 * 18_432),
    "70b": 2 * 80 * (16_384 + 2 * 9_216 + 16_384 + 3 * 36_864),
}
"""Of an adapter of all linear layers of Llama 3 in 16 bits: the widths in and out of each projection of each layer."""

DISK_BYTES_PER_S, SLOT_BYTES_PER_S = 2.0e9, 11.5e9
"""From disk to host memory, and from there to a slot, as `make bench-load` measured."""

STEP_S = 0.03
"""A step: the 16 GB of an 8B model in 16 bits, read at the 600 GB/s of an A10G, take 27 ms."""


def real_bytes(rank: int, model: str) -> int:
    """Size of the adapter that one of this rank stands for."""
    return rank * BYTES_PER_RANK[model]


class Line:
    """Something that moves bytes, one load after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def due_s(self, num_bytes: int) -> float:
        """Have so many bytes moved after all that came before; returns when they will be there, by `time.monotonic`."""
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + num_bytes / self._bytes_per_s
            return self._free_s


def sleep_until(due_s: float) -> None:
    """Return at that time of `time.monotonic`, or at once where it is past."""
    time.sleep(max(0.0, due_s - time.monotonic()))


class TimedReader(AdapterReader):
    """Reads in the time that the real adapter takes."""

    disk = Line(DISK_BYTES_PER_S)

    def read(self, name: str, path: Path) -> tuple[AdapterRecord, LoRAModel]:
        record, tensors = super().read(name, path)
        sleep_until(self.disk.due_s(real_bytes(record.rank, os.environ[MODEL_VARIABLE])))
        return record, tensors


class TimedWrite:
    """A slot's write that is complete when the real one would be."""

    def __init__(self, write: Any, due_s: float) -> None:
        self._write = write
        self._is_written = False
        self._due_s = due_s

    def advance(self, budget_s: float | None) -> bool:
        """Write on; without a budget, wait for the end."""
        self._is_written = self._is_written or self._write.advance(budget_s)
        if budget_s is None:
            sleep_until(self._due_s)
        return self._is_written and time.monotonic() >= self._due_s


class TimedInputs(LoRAInputs):
    """Writes slots in the time that the real adapter takes."""

    bus = Line(SLOT_BYTES_PER_S)

    def begin_write(self, slot: int, adapter: Any) -> Any:
        due_s = self.bus.due_s(real_bytes(adapter.rank, os.environ[MODEL_VARIABLE]))
        return TimedWrite(super().begin_write(slot, adapter), due_s)


class TimedEngine(LLMEngine):
    """Steps in the time that a device takes."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        run = self.runner.run

        def run_slowly(batch: ScheduledBatch, *rest: Any) -> Any:
            due_s = time.monotonic() + STEP_S
            logits = run(batch, *rest)
            sleep_until(due_s)
            return logits

        setattr(self.runner, "run", run_slowly)  # noqa: B010 (a method)


if __name__ == "__main__":
    # The manager makes the first two when the engine is made, and `_serve` imports the engine when it starts.
    import lora_core.engine.engine
    import lora_core.manager

    setattr(lora_core.manager, "AdapterReader", TimedReader)  # noqa: B010 (no name of its own is exported)
    setattr(lora_core.manager, "LoRAInputs", TimedInputs)  # noqa: B010
    lora_core.engine.engine.LLMEngine = TimedEngine  # type: ignore[misc]
    os._exit(engine_process.main())
