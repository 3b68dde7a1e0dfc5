"""From a name and a source to a loaded adapter: read and checked once, however many ask for it at a time."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lora_core.adapters import AdapterTable
from lora_core.errors import AdapterNameTaken, InvalidAdapter, InvalidAdapterPath
from lora_core.model import LoRAModel
from lora_core.types import LoRAResponse, LoRAStatus

logger = logging.getLogger(__name__)


class AdapterSource(Protocol):
    """Finds an adapter's folder."""

    def resolve(self, source: str) -> Path:
        """The absolute folder of `source`, symbolic links followed. Raises InvalidAdapterPath if there is none."""
        ...


@dataclass
class _Reading:
    """A load in progress; `response` is set when it ends."""

    folder: Path
    response: LoRAResponse | None = None


class AdapterLoader:
    """Loads adapters into a table. Thread-safe; files are read with no lock held."""

    def __init__(
        self, table: AdapterTable[LoRAModel], source: AdapterSource, read: Callable[[str, Path], LoRAModel]
    ) -> None:
        """Load into `table`.

        Args:
            table: Where loaded adapters go.
            source: Finds an adapter's folder.
            read: Reads and checks the adapter of a name in a folder; raises InvalidAdapterPath or InvalidAdapter.
        """
        self._table = table
        self._source = source
        self._read = read
        self._ended = threading.Condition()
        self._readings: dict[str, _Reading] = {}

    def load(self, name: str, source: str, generation: int | None) -> LoRAResponse:
        """Load one adapter; see `LoRAManagerV3.load_adapter`. Never raises."""
        try:
            return self._load(name, self._source.resolve(source), generation)
        except Exception as error:
            return _failure(name, source, error)

    def _load(self, name: str, folder: Path, generation: int | None) -> LoRAResponse:
        reading = _Reading(folder)
        while (other := self._begin(name, reading)) is not reading:
            response = self._wait(other)
            if other.folder == folder:
                return response
        try:
            reading.response = self._read_into_table(name, folder, generation)
        except Exception as error:
            reading.response = _failure(name, str(folder), error)
        finally:
            self._end(name, reading)
        return reading.response

    def _begin(self, name: str, reading: _Reading) -> _Reading:
        """The load in progress for this name: `reading` itself if there was none."""
        with self._ended:
            return self._readings.setdefault(name, reading)

    def _wait(self, other: _Reading) -> LoRAResponse:
        with self._ended:
            while other.response is None:
                self._ended.wait()
            return other.response

    def _end(self, name: str, reading: _Reading) -> None:
        with self._ended:
            del self._readings[name]
            if reading.response is None:  # the reading thread is being stopped; those who wait must not hang
                message = f"LoRA adapter {name!r} was not loaded: its load was interrupted"
                reading.response = LoRAResponse(LoRAStatus.LOAD_ERROR, message)
            self._ended.notify_all()

    def _read_into_table(self, name: str, folder: Path, generation: int | None) -> LoRAResponse:
        held = self._table.find(name)
        if held is None:
            self._table.add(name, self._read(name, folder), generation)
            return LoRAResponse(LoRAStatus.SUCCESS, f"LoRA adapter {name!r} loaded successfully")
        _, model = held
        if model.path != folder:
            raise _taken(name, model.path, f"load {folder} under another name")
        if self._read(name, folder).content_hash != model.content_hash:
            raise _taken(name, model.path, "whose files have changed since")
        return LoRAResponse(LoRAStatus.SUCCESS, f"LoRA adapter {name!r} is already loaded")


def _taken(name: str, folder: Path, rest: str) -> AdapterNameTaken:
    return AdapterNameTaken(f"LoRA adapter {name!r} is already loaded from {folder}; unload it first, or {rest}")


def _failure(name: str, source: str, error: Exception) -> LoRAResponse:
    """The answer to a load that failed; a failure nobody foresaw is logged with its traceback."""
    if isinstance(error, AdapterNameTaken):
        return LoRAResponse(LoRAStatus.LOAD_NAME_EXISTS, str(error))
    message = f"LoRA adapter {name!r} was not loaded: {error}"
    if isinstance(error, InvalidAdapterPath):
        return LoRAResponse(LoRAStatus.LOAD_INVALID_PATH, message)
    if isinstance(error, InvalidAdapter):
        return LoRAResponse(LoRAStatus.LOAD_INVALID_ADAPTER, message)
    logger.error("loading LoRA adapter %r from %s failed", name, source, exc_info=error)
    message = f"LoRA adapter {name!r} was not loaded: {type(error).__name__}: {error} (more in the server's log)"
    return LoRAResponse(LoRAStatus.LOAD_ERROR, message)
