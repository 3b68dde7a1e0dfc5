"""From a name and a source to a loaded adapter: found and read once, however many ask for it at a time."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from lora_core.adapter_record import AdapterRecord, FolderStamp
from lora_core.adapters import AdapterTable
from lora_core.errors import (
    AdapterError,
    AdapterNameTaken,
    AdapterNotFound,
    InvalidAdapter,
    InvalidAdapterPath,
    describe,
)
from lora_core.load_times import LoadTimes
from lora_core.places import Places
from lora_core.types import AdapterRef, LoRAResponse, LoRAStatus

M = TypeVar("M")

logger = logging.getLogger(__name__)

MAX_READS = 4
"""Adapters read at a time, whose tensors are in host memory beyond `host_memory_bytes` until they are admitted; those
not counted that take long."""


class AdapterSource(Protocol):
    """Finds an adapter's folder."""

    def resolve(self, source: str) -> Path:
        """The absolute folder of `source`, symbolic links followed. Raises InvalidAdapterPath if there is none."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """What a load asks for; loads of one name that ask for the same at the same time are one.

    Attributes:
        source: Where the adapter is, as the operator gave it.
        generation: Identity it gets; None: a fresh one, or the one it has.
        replace: Take the place of the adapter that has the name.
        content_hash: Refuse other files than those of this hash; None accepts any.
    """

    source: str
    generation: int | None = None
    replace: bool = False
    content_hash: str | None = None


@dataclass
class _Loading:
    """A load in progress; `response` is set when it ends."""

    request: LoadRequest
    folder: Path | None = None
    stamp: FolderStamp = field(default_factory=lambda: FolderStamp((), False))
    response: LoRAResponse | None = None

    def still_holds(self) -> bool:
        """Whether the files are as this load found them, so that its answer is that of a load begun now."""
        if self.folder is None:
            return not os.path.isdir(self.request.source)
        return FolderStamp.of(self.folder).files == self.stamp.files


class AdapterLoader(Generic[M]):
    """Loads adapters into a table. Thread-safe; files are found and read with no lock held."""

    def __init__(
        self,
        table: AdapterTable[M],
        source: AdapterSource,
        read: Callable[[str, Path], tuple[AdapterRecord, M]],
        host_memory_bytes: int,
        times: LoadTimes | None = None,
    ) -> None:
        """Load into `table`.

        Args:
            table: Where loaded adapters go.
            source: Finds an adapter's folder.
            read: Reads and checks the adapter of a name in a folder; raises InvalidAdapterPath or InvalidAdapter.
            host_memory_bytes: What the tensors of one adapter may take at most.
            times: Where downloads are noted.
        """
        self._table = table
        self._source = source
        self._read = read
        self._host_memory_bytes = host_memory_bytes
        self._times = times or LoadTimes()
        self._ended = threading.Condition()
        self._in_progress: dict[str, _Loading] = {}
        self._reads = Places(MAX_READS)

    def load(self, name: str, request: LoadRequest) -> LoRAResponse:
        """Load one adapter; see `LoRAManagerV3.load_adapter`. Never raises."""
        loading = _Loading(request)
        while (other := self._begin(name, loading)) is not loading:
            response = self._wait(other)
            if other.request == request and other.still_holds():
                return response
        try:
            while loading.response is None:
                # Unloaded by another thread just when this load found it: then it is to be loaded after all.
                with contextlib.suppress(AdapterNotFound):
                    loading.response = self._load(name, loading)
        except Exception as error:
            loading.response = _failure(name, request.source, error)
        finally:
            self._end(name, loading)
        return loading.response

    def _begin(self, name: str, loading: _Loading) -> _Loading:
        """The load in progress for this name: `loading` itself if there was none."""
        with self._ended:
            return self._in_progress.setdefault(name, loading)

    def _wait(self, other: _Loading) -> LoRAResponse:
        with self._ended:
            while other.response is None:
                self._ended.wait()
            return other.response

    def _end(self, name: str, loading: _Loading) -> None:
        with self._ended:
            del self._in_progress[name]
            if loading.response is None:  # the loading thread is being stopped; those who wait must not hang
                message = f"LoRA adapter {name!r} was not loaded: its load was interrupted"
                loading.response = LoRAResponse(LoRAStatus.LOAD_ERROR, message)
            self._ended.notify_all()

    def _load(self, name: str, loading: _Loading) -> LoRAResponse:
        request = loading.request
        started, started_ns = time.perf_counter(), time.time_ns()
        folder = loading.folder = self._source.resolve(request.source)
        find_s = time.perf_counter() - started
        stamp = loading.stamp = FolderStamp.of(folder)
        twin = None if request.content_hash is None else self._table.in_memory(folder, request.content_hash)
        if twin is not None:
            # As when what was loaded from there and checked under another name takes its place: it is what is meant,
            # whatever the folder holds by now.
            return self._admit(name, *twin, request)
        held = self._table.find(name)
        if held is not None:
            ref, record = held
            if record.path != folder and not request.replace:
                raise _taken(name, record.path, f"load {folder} under another name")
            if record.path == folder and record.stamp.proves_unchanged(stamp):
                self._table.refresh(ref, record, None)
                return self._keep(name, ref, record, request)
        with self._reads.hold():
            record, tensors = self._read(name, folder)
            if not os.path.isdir(os.path.expanduser(request.source)) and stamp.has_news_since(started_ns):
                self._times.fetched(record.num_bytes, find_s)
            record = replace(record, phases_s={"find": find_s, **record.phases_s})
            return self._admit(name, record, tensors, request)

    def _admit(self, name: str, record: AdapterRecord, tensors: M, request: LoadRequest) -> LoRAResponse:
        _check_content(record, request)
        held = self._table.find(name)
        if held is not None and held[1].content_hash == record.content_hash:
            ref, first = held
            # The report stays that of the load that made the adapter what it is.
            first = replace(first, path=record.path, stamp=record.stamp)
            self._table.refresh(ref, first, tensors)
            return self._keep(name, ref, first, request)
        if held is not None and not request.replace:
            raise _taken(name, held[1].path, "whose files have changed since")
        if record.num_bytes > self._host_memory_bytes:
            raise InvalidAdapter(
                f"its tensors take {record.num_bytes} bytes of host memory, and there are {self._host_memory_bytes} "
                "for all adapters; raise lora_config.host_memory_bytes"
            )
        ref = self._table.add(name, record, tensors, request.generation, replace=request.replace)
        return _success(ref, record, "")

    def _keep(self, name: str, ref: AdapterRef, record: AdapterRecord, request: LoadRequest) -> LoRAResponse:
        """Answer a load of what is loaded already.

        A generation that differs from the adapter's becomes its identity, as whoever gave it will speak of the adapter
        by it; requests in progress finish under the old one.
        """
        _check_content(record, request)
        if request.generation in (None, ref.generation):
            return _success(ref, record, "it was loaded already, and nothing changed")
        old, ref = ref, self._table.renumber(name, request.generation)
        return _success(ref, record, f"it was loaded already, and changed from generation {old.generation}")


def _check_content(record: AdapterRecord, request: LoadRequest) -> None:
    if request.content_hash not in (None, record.content_hash):
        raise InvalidAdapter(
            f"the files of {record.path} have content hash {record.content_hash[:12]}..., expected "
            f"{request.content_hash[:12]}...; bring the expected files there, or ask for the hash that they have"
        )


def _success(ref: AdapterRef, record: AdapterRecord, note: str) -> LoRAResponse:
    report = record.report(ref.generation)
    if report.is_noop:
        note = "; ".join(filter(None, [note, "it is a no-op: no module's output differs from the base model's"]))
    message = f"LoRA adapter {ref.name!r} loaded successfully" + (f"; {note}" if note else "")
    return LoRAResponse(LoRAStatus.SUCCESS, message, report)


def _taken(name: str, folder: Path, rest: str) -> AdapterNameTaken:
    return AdapterNameTaken(
        f"LoRA adapter {name!r} is already loaded from {folder}; "
        f"unload it first, load in place (load_inplace), or {rest}"
    )


def _failure(name: str, source: str, error: Exception) -> LoRAResponse:
    """The answer to a load that failed; a failure nobody foresaw is logged with its traceback."""
    if isinstance(error, AdapterNameTaken):
        return LoRAResponse(LoRAStatus.LOAD_NAME_EXISTS, str(error))
    message = f"LoRA adapter {name!r} was not loaded: {error}"
    if isinstance(error, InvalidAdapterPath):
        return LoRAResponse(LoRAStatus.LOAD_INVALID_PATH, message)
    if isinstance(error, InvalidAdapter):
        return LoRAResponse(LoRAStatus.LOAD_INVALID_ADAPTER, message)
    if isinstance(error, AdapterError):
        return LoRAResponse(LoRAStatus.LOAD_ERROR, message)
    logger.error("loading LoRA adapter %r from %s failed", name, source, exc_info=error)
    message = f"LoRA adapter {name!r} was not loaded: {describe(error)} (more in the server's log)"
    return LoRAResponse(LoRAStatus.LOAD_ERROR, message)
