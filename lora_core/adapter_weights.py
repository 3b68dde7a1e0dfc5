"""The safetensors files of an adapter folder: headers first, tensors when the headers have been found good.

Files are read, never mapped: a file that shrinks under a mapping kills the process, and a mapping would tie loaded
adapters to their folder. They are read here rather than by the safetensors library, whose only reader from memory
copies everything with the interpreter lock held, which stops a step loop in the same process for as long. Pickled
files (`.bin`, `.pt`) are never opened.

Tensors are read block by block, so that the hash, the checks and the conversion find each block in the processor's
cache: straight to where they stay, or to one small buffer if they are converted. Memory new to the process is the most
expensive part of a load: every page costs more than reading it does.
"""

import math
import os
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import blake3
import msgspec
import torch
from torch import Tensor

from lora_core.errors import InvalidAdapter
from lora_core.weight_files import INDEX_FILE, find_weights, parse_index

_MAX_HEADER_BYTES = 16 * 2**20
_BLOCK_BYTES = 2**20
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SERVED_DTYPES = tuple(_DTYPES)
"""Names that safetensors gives the data types that can be read."""


class TensorInfo(NamedTuple):
    """What a header says of one tensor: the file it is in, its safetensors dtype (`F32`, `BF16`, ...), its shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its dtype, if it is one of `SERVED_DTYPES`."""
        return _DTYPES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Its size, if its dtype is one of `SERVED_DTYPES`."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Header(NamedTuple):
    """A safetensors file's header: its JSON, as found and parsed; the whole file's size and time of its last change."""

    encoded: bytes
    entries: dict[str, _Entry]
    file_size: int
    changed_ns: int

    @property
    def data_start(self) -> int:
        return 8 + len(self.encoded)


class AdapterWeights:
    """The open weight files of one adapter; a context manager that closes them.

    Attributes:
        tensors: Every tensor of the files, by key, from their headers.
    """

    def __init__(self, folder: Path) -> None:
        """Find the files and read their headers.

        Raises:
            InvalidAdapter: no safetensors file, a file that is empty, truncated or not safetensors, an index that
                disagrees with its shards, or one key in two files.
        """
        self.tensors: dict[str, TensorInfo] = {}
        self._files: dict[str, FileIO] = {}
        self._headers: dict[str, _Header] = {}
        self._digests: dict[str, bytes] = {}
        try:
            names, weight_map = _weight_files(folder)
            for name in names:
                self._open(folder, name)
            if weight_map is not None:
                _check_index(weight_map, self.tensors)
        except OSError as error:
            self.close()
            raise InvalidAdapter(f"{str(folder)!r}: the weights cannot be read: {error}") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "AdapterWeights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; safe to call again."""
        for file in self._files.values():
            file.close()

    def blocks(self, key: str, buffer: "BlockBuffer | Destination") -> Iterator[tuple[int, Tensor]]:
        """Read a tensor, and hash it.

        Args:
            key: A tensor of one of `SERVED_DTYPES`.
            buffer: Where to read to.

        Yields:
            The index of a block's first row, and its rows `[n, ...]`, in a buffer good until the next block is read.

        Raises:
            InvalidAdapter: the file changed since its header was read, or cannot be read.
        """
        info = self.tensors[key]
        row_shape = info.shape[1:]
        dtype = _DTYPES[info.dtype]
        row_bytes = max(math.prod(row_shape) * dtype.itemsize, 1)
        for start, num_bytes in self._read(key, row_bytes, buffer):
            row, num_rows = start // row_bytes, num_bytes // row_bytes
            yield row, buffer.rows(row, num_rows, dtype, row_shape)

    def whole(self, key: str) -> Tensor:
        """Read a tensor of one of `SERVED_DTYPES` into memory of its own.

        Raises:
            InvalidAdapter: the file changed since its header was read, or cannot be read.
        """
        info = self.tensors[key]
        tensor = torch.empty(info.shape, dtype=_DTYPES[info.dtype])
        for _ in self.blocks(key, Destination(tensor)):
            pass
        return tensor

    def content_hash(self, config: bytes) -> str:
        """Hash of the adapter: of its config's bytes, and of the name, dtype, shape and bytes of every tensor.

        It does not depend on how tensors are spread over files or ordered in them, nor on the headers' other contents.
        Tensors that have not been read are read now.

        Returns:
            BLAKE3 in hex.

        Raises:
            InvalidAdapter: a file changed since its header was read, or cannot be read.
        """
        buffer = BlockBuffer()
        for key in self.tensors.keys() - self._digests.keys():
            for _ in self._read(key, 1, buffer):
                pass
        for name in self._files:
            self._check_unchanged(name)
        digest = blake3.blake3(blake3.blake3(config).digest())
        for key, info in sorted(self.tensors.items()):
            # JSON, so that no two lists of tensors have one encoding.
            digest.update(msgspec.json.encode((key, info.dtype, info.shape)))
            digest.update(self._digests[key])
        return digest.hexdigest()

    def _open(self, folder: Path, name: str) -> None:
        path = folder / name
        if not path.is_file():
            raise InvalidAdapter(f"{name}: missing or not a regular file in {str(folder)!r}")
        file = self._files[name] = path.open("rb", buffering=0)
        header = self._headers[name] = _read_header(name, file)
        for key, entry in header.entries.items():
            if key in self.tensors:
                raise InvalidAdapter(f"{name}: tensor {key!r} is in {self.tensors[key].file} too; expected it once")
            self.tensors[key] = TensorInfo(name, entry.dtype, tuple(entry.shape))

    def _read(self, key: str, unit_bytes: int, buffer: "BlockBuffer | Destination") -> Iterator[tuple[int, int]]:
        """Read the tensor in blocks of a whole number of units; it is hashed when all have been taken.

        Yields:
            Where in the tensor a block starts, and its size, in bytes.
        """
        name = self.tensors[key].file
        header, file = self._headers[name], self._files[name].fileno()
        first, last = header.entries[key].data_offsets
        digest = blake3.blake3()
        most_bytes = buffer.make_room(unit_bytes)
        for start in range(0, last - first, most_bytes):
            num_bytes = min(most_bytes, last - first - start)
            block = buffer.block(start, num_bytes)
            try:
                num_read = os.preadv(file, [block], header.data_start + first + start)
            except OSError as error:
                raise InvalidAdapter(f"{name}: cannot be read: {error}") from error
            if num_read != num_bytes:
                raise _changed(name)
            digest.update(block)
            yield start, num_bytes
        self._digests[key] = digest.digest()

    def _check_unchanged(self, name: str) -> None:
        header, file = self._headers[name], self._files[name].fileno()
        status = os.fstat(file)
        is_same = (status.st_size, status.st_mtime_ns) == (header.file_size, header.changed_ns)
        if not is_same or os.pread(file, len(header.encoded), 8) != header.encoded:
            raise _changed(name)


class BlockBuffer:
    """Memory that blocks of tensors are read into, one after the other; for one thread at a time."""

    def __init__(self, num_bytes: int = _BLOCK_BYTES) -> None:
        """Make room for blocks of so many bytes; it grows to the size of one row."""
        self._allocate(num_bytes)

    def make_room(self, unit_bytes: int) -> int:
        """Bytes of the largest block of whole units, of at least one."""
        if unit_bytes > self._num_bytes:
            self._allocate(unit_bytes)
        return self._num_bytes // unit_bytes * unit_bytes

    def block(self, start: int, num_bytes: int) -> memoryview:
        """Where to read the bytes of a tensor from `start` on."""
        return self._bytes[:num_bytes]

    def rows(self, start: int, num_rows: int, dtype: torch.dtype, row_shape: tuple[int, ...]) -> Tensor:
        """The rows of a tensor from `start` on, which have just been read."""
        num_bytes = num_rows * math.prod(row_shape) * dtype.itemsize
        return self._content[:num_bytes].view(dtype).view(num_rows, *row_shape)

    def _allocate(self, num_bytes: int) -> None:
        self._num_bytes = max(num_bytes, 1)
        self._content = torch.empty(self._num_bytes, dtype=torch.uint8)
        self._bytes = self._content.numpy().data


class Destination:
    """The place of a whole tensor, contiguous and of its dtype, that blocks of it are read to and stay in."""

    def __init__(self, tensor: Tensor) -> None:
        """Read to this tensor."""
        self._tensor = tensor
        self._bytes = tensor.view(-1).view(torch.uint8).numpy().data

    def make_room(self, unit_bytes: int) -> int:
        """Bytes of the largest block of whole units, of at least one."""
        return max(_BLOCK_BYTES // unit_bytes, 1) * unit_bytes

    def block(self, start: int, num_bytes: int) -> memoryview:
        """Where to read the bytes of the tensor from `start` on."""
        return self._bytes[start : start + num_bytes]

    def rows(self, start: int, num_rows: int, dtype: torch.dtype, row_shape: tuple[int, ...]) -> Tensor:
        """The tensor's rows from `start` on."""
        return self._tensor[start : start + num_rows]


def _changed(name: str) -> InvalidAdapter:
    return InvalidAdapter(f"{name}: changed while it was being read; load it again when it is written")


def _weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """Names of the files to read, and the index's map of keys to files where there is one."""
    name = find_weights(os.listdir(folder))
    if name != INDEX_FILE:
        return [name], None
    if not (folder / name).is_file():
        raise InvalidAdapter(f"{name}: not a regular file in {str(folder)!r}")
    with (folder / name).open("rb") as file:
        weight_map = parse_index(file.read(_MAX_HEADER_BYTES + 1))
    return sorted(set(weight_map.values())), weight_map


def _check_index(weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    placed = {key: info.file for key, info in tensors.items()}
    if wrong := sorted(key for key in weight_map.keys() | placed.keys() if weight_map.get(key) != placed.get(key)):
        raise InvalidAdapter(f"{INDEX_FILE}: disagrees with its shards on {list_keys(wrong)}; a shard may be stale")


def _read_header(name: str, file: FileIO) -> _Header:
    """Parse a safetensors header: 8 bytes of length, then JSON of that length, then the tensors' bytes."""
    status = os.fstat(file.fileno())
    size = status.st_size
    if size == 0:
        raise InvalidAdapter(f"{name}: the file is empty")
    length = int.from_bytes(file.read(8), "little")
    if size < 8 + length:
        raise InvalidAdapter(f"{name}: truncated or not safetensors: {size} bytes, its header alone claims {length}")
    if length > _MAX_HEADER_BYTES:
        raise InvalidAdapter(f"{name}: a header of {length} bytes, at most {_MAX_HEADER_BYTES} are read")
    header = _Header(file.read(length), {}, size, status.st_mtime_ns)
    header.entries.update(_parse_entries(name, header.encoded))
    _check_layout(name, header)
    return header


def _parse_entries(name: str, encoded: bytes) -> dict[str, _Entry]:
    try:
        fields: dict[str, Any] = msgspec.json.decode(encoded, type=dict[str, msgspec.Raw])
        fields.pop("__metadata__", None)
        return {key: msgspec.json.decode(value, type=_Entry) for key, value in fields.items()}
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise InvalidAdapter(f"{name}: not a safetensors header: {error}") from error


def _check_layout(name: str, header: _Header) -> None:
    """The tensors must fill the rest of the file without gap or overlap, each with the bytes of its shape."""
    end = 0
    for key, entry in sorted(header.entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        if start != end or stop < start or min(entry.shape, default=0) < 0:
            raise InvalidAdapter(f"{name}: tensor {key!r} of shape {entry.shape} is at {start}..{stop}, expected {end}")
        dtype = _DTYPES.get(entry.dtype)
        if dtype is not None and stop - start != math.prod(entry.shape) * dtype.itemsize:
            raise InvalidAdapter(f"{name}: tensor {key!r} of {entry.dtype} {entry.shape} has {stop - start} bytes")
        end = stop
    expected = header.data_start + end
    if header.file_size != expected:
        what = "truncated" if header.file_size < expected else "longer than its header says"
        raise InvalidAdapter(f"{name}: {what}: {header.file_size} bytes, expected {expected}")


def list_keys(keys: Iterable[str], limit: int = 20) -> str:
    """The keys, the first `limit` of them in full, for an error message."""
    names = list(keys)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
