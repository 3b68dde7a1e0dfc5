"""Which files of an adapter's folder, here or on a Hub, hold its weights."""

import re
from collections.abc import Iterable

import msgspec

from lora_core.errors import InvalidAdapter

WEIGHTS_FILE = "adapter_model.safetensors"
INDEX_FILE = "adapter_model.safetensors.index.json"

_SAFETENSORS = ".safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")
_MAX_NAMED = 5


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def find_weights(names: Iterable[str]) -> str:
    """The file that holds the weights, or `INDEX_FILE` if they are in the shards that it names.

    Args:
        names: All files, by path from the adapter's folder.

    Raises:
        InvalidAdapter: none of them can be read as weights; what there is, and what was expected, is named.
    """
    names = sorted(names)
    here = [name for name in names if "/" not in name]
    loose = [name for name in here if name.endswith(_SAFETENSORS)]
    if WEIGHTS_FILE in loose:
        return WEIGHTS_FILE
    if INDEX_FILE in here:
        return INDEX_FILE
    if len(loose) == 1 and not _SHARD.fullmatch(loose[0]):
        return loose[0]
    if loose:
        raise InvalidAdapter(f"found {_list(loose)} without {INDEX_FILE}; expected {WEIGHTS_FILE}, or that index")
    if pickled := [name for name in here if name.endswith(_PICKLED)]:
        raise InvalidAdapter(
            f"found {_list(pickled)} and no {WEIGHTS_FILE}: pickled weights are never read; "
            "save the adapter with safe_serialization=True"
        )
    deeper = next((name for name in names if name.endswith(_SAFETENSORS)), None)
    rest = "" if deeper is None else f"; {deeper} is in a sub-folder, and those are not looked into"
    raise InvalidAdapter(f"no {WEIGHTS_FILE}: the adapter's weights are missing{rest}")


def parse_index(content: bytes) -> dict[str, str]:
    """The shard of each key, from the bytes of an `INDEX_FILE`.

    Raises:
        InvalidAdapter: it is no index, or names a file elsewhere.
    """
    try:
        weight_map = msgspec.json.decode(content, type=_Index).weight_map
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise InvalidAdapter(f"{INDEX_FILE}: not a safetensors index: {error}") from error
    for name in weight_map.values():
        if "/" in name or "\0" in name or not name.endswith(_SAFETENSORS):
            raise InvalidAdapter(f"{INDEX_FILE}: names {name!r}, expected a *.safetensors file in the same folder")
    return weight_map


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
