"""The LoRA core: adapters, slots, layers, and the engine that decodes through them.

The public names below are those of Modular MAX's `max.pipelines.lora`, and mean the same. They are imported when first
used, so that a process which needs a message type does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lora_core.channel import LoRAQueue, LoRARequestProcessor
    from lora_core.config import LoRAConfig
    from lora_core.manager import LoRAManagerV3
    from lora_core.model import LoRAModel
    from lora_core.slots import _LoRALRUCache
    from lora_core.targets import LoRATargetModule
    from lora_core.types import (
        ADAPTER_CONFIG_FILE,
        LORA_REQUEST_ENDPOINT,
        LORA_RESPONSE_ENDPOINT,
        LoRAOperation,
        LoRARequest,
        LoRAResponse,
        LoRAStatus,
        LoRAType,
    )

_MODULES = {
    "ADAPTER_CONFIG_FILE": "lora_core.types",
    "LORA_REQUEST_ENDPOINT": "lora_core.types",
    "LORA_RESPONSE_ENDPOINT": "lora_core.types",
    "LoRAConfig": "lora_core.config",
    "LoRAManagerV3": "lora_core.manager",
    "LoRAModel": "lora_core.model",
    "LoRAOperation": "lora_core.types",
    "LoRAQueue": "lora_core.channel",
    "LoRARequest": "lora_core.types",
    "LoRARequestProcessor": "lora_core.channel",
    "LoRAResponse": "lora_core.types",
    "LoRAStatus": "lora_core.types",
    "LoRATargetModule": "lora_core.targets",
    "LoRAType": "lora_core.types",
    "_LoRALRUCache": "lora_core.slots",
}

__all__ = [
    "ADAPTER_CONFIG_FILE",
    "LORA_REQUEST_ENDPOINT",
    "LORA_RESPONSE_ENDPOINT",
    "LoRAConfig",
    "LoRAManagerV3",
    "LoRAModel",
    "LoRAOperation",
    "LoRAQueue",
    "LoRARequest",
    "LoRARequestProcessor",
    "LoRAResponse",
    "LoRAStatus",
    "LoRATargetModule",
    "LoRAType",
    "_LoRALRUCache",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
