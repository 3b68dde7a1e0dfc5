"""Tile sizes measured on a device: one file a device, beside this module, written by `make tune`.

A file is `{"format": 1, "device": name, "versions": {...}, "date": ..., "entries": [...]}`, an entry the fields of a
`Point` that are not 0, a `tile`, and what it took: `{"kernel": "expand", ..., "tile": {...}, "us": 3.1,
"default_us": 3.4}`. What cannot be read is ignored with one warning: the defaults then hold, and nothing fails.
"""

import json
import logging
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "tuned"

FORMAT = 1

_WARPS = (1, 2, 4, 8)

CHOICES: dict[str, dict[str, tuple[int, ...]]] = {
    "rows": {"block_m": (4, 8, 16, 32, 64)},
    "launch": {"dependent": (0, 1)},
    "shrink": {
        "block_n": (16, 32, 64, 128),
        "block_k": (16, 32, 64, 128, 256, 512),
        "splits": (1, 2, 4, 8, 16),
        "num_warps": _WARPS,
        "num_stages": (1, 2, 3, 4, 5, 6),
    },
    "expand": {"block_n": (16, 32, 64, 128, 256), "num_warps": _WARPS},
    "swiglu": {"block_n": (16, 32, 64, 128), "num_warps": _WARPS},
}
"""What there is to choose and the values each part may have: all that the kernels compute right for.

`rows` (of the tile table) and `launch` (whether the second of two launches may start before the first has ended) are
choices of a step, the others are tiles of a kernel.
"""

_REACH = 1.0
"""How far an entry's width, tokens and groups may each be from those asked for, in doublings."""


class Point(NamedTuple):
    """What a choice is made for. Parts that do not matter to a kernel are 0.

    Attributes:
        kernel: A key of `CHOICES`.
        tokens: Rows of the step, rounded up to a power of two.
        groups: Most groups those rows can be in, rounded up to a power of two.
        block_m: Rows of a tile of the step's tile table.
        itemsize: Bytes of a value of the activations.
        rank: Padded rank of the adapters, rounded up to a power of two.
        projections: Projections of the fused site.
        width: The long side of the adapter matrix: input features of A, output features of B.
    """

    kernel: str
    tokens: int
    groups: int
    block_m: int = 0
    itemsize: int = 0
    rank: int = 0
    projections: int = 0
    width: int = 0


class Entry(NamedTuple):
    """A measured choice: the tile, its time, and the time of the default tile in the same run."""

    tile: Mapping[str, int]
    us: float
    default_us: float


@dataclass(frozen=True, eq=False)
class TuningTable:
    """The measured choices of one device. Two tables are never equal, so that results may be cached by table."""

    entries: Mapping[Point, Entry] = field(default_factory=dict)

    def find(self, point: Point) -> Mapping[str, int] | None:
        """The tile of the nearest entry, or None where none is near enough.

        Kernel, tile rows, itemsize and projections must be equal and the rank at most doubled, so that what fitted on
        a multiprocessor when it was measured fits here too. Width, tokens and groups may each differ by a factor of 2.
        """
        alike = self._alike.get(_kind(point), ())
        distance, nearest = min(((_distance(point, other), other) for other in alike), default=(math.inf, point))
        return self.entries[nearest].tile if distance < math.inf else None

    @cached_property
    def _alike(self) -> Mapping[tuple[str, int, int, int], list[Point]]:
        """The entries' points by what must be equal."""
        alike = defaultdict(list)
        for point in self.entries:
            alike[_kind(point)].append(point)
        return alike


def power_of_two(number: int) -> int:
    """The smallest power of two that is not smaller; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()


def step_point(kernel: str, num_rows: int, max_groups: int, **rest: int) -> Point:
    """The point of a step of `num_rows` rows in at most `max_groups` groups, in its bucket."""
    tokens = power_of_two(num_rows)
    return Point(kernel, tokens, min(tokens, power_of_two(max_groups)), **rest)


def table_of(device: str) -> TuningTable:
    """The table of a device: its file's, read once, or an empty one where there is no file."""
    return _trials.get(device) or _shipped(device)


_trials: dict[str, TuningTable] = {}


@contextmanager
def trial(device: str, entries: Mapping[Point, Entry]) -> Iterator[None]:
    """Inside it a device's choices are these, in the whole process: how candidates are measured before they are kept.

    It must not be entered while another thread launches kernels, nor between the halves of one operation.
    """
    before = _trials.get(device)
    _trials[device] = TuningTable(entries)
    try:
        yield
    finally:
        if before is None:
            del _trials[device]
        else:
            _trials[device] = before


@cache
def _shipped(device: str) -> TuningTable:
    return read(path_of(device), device)


def path_of(device: str, folder: Path = FOLDER) -> Path:
    """The file of a device: `NVIDIA H200` has `nvidia-h200.json`."""
    return folder / f"{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def read(path: Path, device: str) -> TuningTable:
    """Read a device's file; what is damaged, or not understood, is left out with one warning that names it."""
    try:
        listed = _listed(json.loads(path.read_bytes()), device)
    except FileNotFoundError:
        return TuningTable()
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s is ignored: %s; default tile sizes are used, `make tune` writes it anew", path, error)
        return TuningTable()
    entries: dict[Point, Entry] = {}
    faults = []
    for index, item in enumerate(listed):
        try:
            point, entry = _parsed(item)
            entries[point] = entry
        except (ValueError, OverflowError) as error:
            faults.append(f"entry {index} ({str(item)[:120]}): {error}")
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        logger.warning(
            "%s: %s%s; default tile sizes are used there, `make tune` measures them again", path, faults[0], more
        )
    return TuningTable(entries)


def write(path: Path, device: str, entries: Mapping[Point, Entry], versions: Mapping[str, str]) -> None:
    """Write a device's file in one stroke: readers find the old one or the new one."""
    head = {
        "format": FORMAT,
        "device": device,
        "versions": dict(versions),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }
    lines = ",\n".join(f"    {json.dumps(_written(point, entries[point]))}" for point in sorted(entries))
    text = f'{json.dumps(head, indent=2)[:-2]},\n  "entries": [\n{lines}\n  ]\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """What compiled the kernels that are measured in this process."""
    import triton

    return {"torch": str(torch.__version__), "triton": triton.__version__}


def _kind(point: Point) -> tuple[str, int, int, int]:
    return point.kernel, point.block_m, point.itemsize, point.projections


def _distance(point: Point, other: Point) -> float:
    """Doublings between two points; infinite past the reach of an entry."""
    pairs = ((point.width, other.width), (point.tokens, other.tokens), (point.groups, other.groups))
    steps = [abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs]
    if max(steps) > _REACH or not point.rank <= other.rank <= 2 * point.rank:
        return math.inf
    # Another rank is another amount of work for every program: the last thing to differ in.
    return sum(steps) + 2 * (other.rank != point.rank)


def _listed(content: Any, device: str) -> list[Any]:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"its format is {found!r}, expected {FORMAT}")
    if content.get("device") != device:
        raise ValueError(f"it is of {content.get('device')!r}, this device is {device!r}")
    entries = content.get("entries")
    if not isinstance(entries, list):
        raise ValueError(f"its entries are {type(entries).__name__}, expected a list")
    return entries


def _parsed(item: Any) -> tuple[Point, Entry]:
    if not isinstance(item, dict):
        raise ValueError(f"it is {type(item).__name__}, expected an object")
    values = dict(item)
    kernel, tile = values.pop("kernel", None), values.pop("tile", None)
    us, default_us = values.pop("us", 0.0), values.pop("default_us", 0.0)
    if not isinstance(kernel, str) or kernel not in CHOICES:
        raise ValueError(f"kernel is {kernel!r}, expected one of {', '.join(CHOICES)}")
    if unknown := sorted(set(values) - set(Point._fields)):
        raise ValueError(f"it has {', '.join(map(repr, unknown))}, expected {', '.join(Point._fields)}")
    for name in ("tokens", "groups", *values):
        _check_count(name, values.get(name))
    for name in ("tokens", "groups", "rank"):
        if values.get(name) and values[name] != power_of_two(values[name]):
            raise ValueError(f"{name} is {values[name]}, expected a power of two")
    _check_tile(CHOICES[kernel], tile)
    if not all(isinstance(time, int | float) and math.isfinite(time) for time in (us, default_us)):
        raise ValueError(f"us is {us!r} and default_us {default_us!r}, expected numbers")
    return Point(kernel, **values), Entry(tile, us, default_us)


def _check_count(name: str, value: Any) -> None:
    if type(value) is not int or not 0 < value < 2**31:
        raise ValueError(f"{name} is {value!r}, expected a positive number")


def _check_tile(choices: Mapping[str, Iterable[int]], tile: Any) -> None:
    if not isinstance(tile, dict) or tile.keys() != choices.keys():
        found = sorted(tile) if isinstance(tile, dict) else type(tile).__name__
        raise ValueError(f"its tile has {found}, expected {', '.join(choices)}")
    for name, allowed in choices.items():
        if type(tile[name]) is not int or tile[name] not in allowed:
            raise ValueError(f"{name} is {tile[name]!r}, expected one of {', '.join(map(str, allowed))}")


def _written(point: Point, entry: Entry) -> dict[str, Any]:
    given = {name: value for name, value in point._asdict().items() if value}
    return {**given, "tile": dict(entry.tile), "us": round(entry.us, 3), "default_us": round(entry.default_us, 3)}
