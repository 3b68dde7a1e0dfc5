"""The names adapters are spoken of by: operations, statuses, and the messages that carry them.

Names follow Modular MAX's public `max.pipelines.lora`.
"""

import enum
from typing import Literal, NamedTuple

import msgspec

from lora_core.portable import portable

ADAPTER_CONFIG_FILE = "adapter_config.json"
LORA_REQUEST_ENDPOINT = "lora_request"
LORA_RESPONSE_ENDPOINT = "lora_response"


class LoRAType(enum.Enum):
    """Which tensor of an adapted module a key names."""

    A = "lora_A"
    """Projects down, `[rank, in]`."""
    B = "lora_B"
    """Projects up, `[out, rank]`."""
    BIAS = "lora.bias"
    """A bias learned beside the pair; refused at load."""
    GAIN = "lora_gain"
    """DoRA's factor on the module's output, less one: `[out]`, zero where an adapter is plain LoRA."""


class LoRAOperation(enum.Enum):
    """What a `LoRARequest` asks for."""

    LOAD = "load"
    UNLOAD = "unload"
    PIN = "pin"
    UNPIN = "unpin"
    WARM = "warm"
    """Bring an adapter to a slot before requests come for it: to host memory first, then to a slot that is free or
    whose adapter is needed less. Never takes a slot from running requests, a pin or a protected adapter."""


class LoRAStatus(enum.Enum):
    """How a `LoRARequest` ended."""

    SUCCESS = "success"
    LOAD_NAME_EXISTS = "load_name_exists"
    UNLOAD_NAME_NONEXISTENT = "unload_name_nonexistent"
    LOAD_ERROR = "load_error"
    UNLOAD_ERROR = "unload_error"
    LOAD_INVALID_PATH = "load_invalid_path"
    LOAD_INVALID_ADAPTER = "load_invalid_adapter"
    PIN_NAME_NONEXISTENT = "pin_name_nonexistent"
    """Of a pin, an unpin or a warm-up."""
    PIN_ERROR = "pin_error"
    UNAVAILABLE = "unavailable"
    """Nothing is wrong with what was asked: who should do it is not there, does not answer, or has no room now."""
    PARTIAL = "partial"
    """Done by some replicas of a fleet and not by others, which are asked again; never an engine's own answer."""
    UNSPECIFIED_ERROR = "unspecified_error"


@portable
class LoRARequest(msgspec.Struct, omit_defaults=True, gc=False):
    """Load, unload, pin, unpin or warm one adapter."""

    operation: LoRAOperation
    lora_name: str
    lora_path: str | None = None
    generation: int | None = None
    """Identity the adapter gets at load; unset lets the manager choose one."""
    replace: bool = False
    """A load takes the place of the adapter that has this name: requests in flight finish on the old weights."""
    content_hash: str | None = None
    """A load is refused if the files are not those of this hash; unset accepts any."""


@portable
class LoadReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a load found and did."""

    generation: int
    content_hash: str
    """Hash, in hex, that identifies the config and the weights."""
    num_modules: int
    ranks: dict[int, int]
    """How many modules have each true rank."""
    num_bytes: int
    """Host memory the adapter takes."""
    noop_modules: list[str] = []
    """Modules whose output on a fixed input is the base's: all of them if the adapter is a no-op."""
    phases_s: dict[str, float] = {}
    """Seconds by phase: find (the folder, a download included) is time that passed; read, check, convert and canary are
    work added up over the load's threads."""

    @property
    def is_noop(self) -> bool:
        """Whether no module's output differs from the base's."""
        return len(self.noop_modules) == self.num_modules


@portable
class LoRAResponse(msgspec.Struct, omit_defaults=True):
    """How a `LoRARequest` ended, in a status and in words."""

    status: LoRAStatus
    message: str | list[str]
    report: LoadReport | None = None
    """Of the load that made the adapter what it is now; set when a load ends well."""


@portable
class AdapterStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One adapter that admits requests, as an engine holds it."""

    name: str
    generation: int
    tier: Literal["slot", "host", "disk"]
    """Where a request would find its tensors: in a slot, in host memory, or only in its folder."""
    pinned: bool = False
    """Whether it keeps its slot, or gets the next one."""
    num_users: int = 0
    """Requests of this generation, waiting or running."""
    draining: list[int] = []
    """Older generations of the name that still have requests."""
    report: LoadReport | None = None
    """Of the load that made the adapter what it is."""


class AdapterRef(NamedTuple):
    """One loaded adapter: a name may be reused, a generation never is."""

    name: str
    generation: int
