"""The names adapters are spoken of by: operations, statuses, and the messages that carry them.

Names follow Modular MAX's public `max.pipelines.lora`.
"""

import enum
from typing import NamedTuple

import msgspec

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


class LoRAOperation(enum.Enum):
    """What a `LoRARequest` asks for."""

    LOAD = "load"
    UNLOAD = "unload"


class LoRAStatus(enum.Enum):
    """How a `LoRARequest` ended."""

    SUCCESS = "success"
    LOAD_NAME_EXISTS = "load_name_exists"
    UNLOAD_NAME_NONEXISTENT = "unload_name_nonexistent"
    LOAD_ERROR = "load_error"
    UNLOAD_ERROR = "unload_error"
    LOAD_INVALID_PATH = "load_invalid_path"
    LOAD_INVALID_ADAPTER = "load_invalid_adapter"
    UNSPECIFIED_ERROR = "unspecified_error"


class LoRARequest(msgspec.Struct, omit_defaults=True):
    """Load or unload one adapter."""

    operation: LoRAOperation
    lora_name: str
    lora_path: str | None = None
    generation: int | None = None
    """Identity the adapter gets at load; unset lets the manager choose one."""


class LoRAResponse(msgspec.Struct):
    """How a `LoRARequest` ended, in a status and in words."""

    status: LoRAStatus
    message: str | list[str]


class AdapterRef(NamedTuple):
    """One loaded adapter: a name may be reused, a generation never is."""

    name: str
    generation: int
