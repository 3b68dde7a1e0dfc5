"""A device with Triton and graphs, on the CPU: kernels under the interpreter, and recordings in place of graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

import lora_core.engine.runner
import lora_core.inputs
from kernels import PagedLayout, Routing, build_routing
from kernels.tuning import row_tile
from lora_core.engine.kv_cache import KVLayout
from tests.engine.operator_recorder import OperatorRecorder
from tests.kernels.scratch import poisoned_empty


def triton_layout(layout: KVLayout, num_heads: int, *, dtype: torch.dtype, device: torch.device) -> PagedLayout:
    """What `paged_layout` gives on a device that runs Triton."""
    return PagedLayout(num_heads, layout.num_kv_heads, layout.head_dim, layout.block_size, layout.num_blocks, dtype)


def tiled_routing(*arguments: Any, num_rows: int, max_groups: int, **options: Any) -> Routing:
    """Routings as on a device with Triton, whose tiles follow from shapes."""
    block_m = row_tile(num_rows, max_groups, "cpu")
    return build_routing(*arguments, num_rows=num_rows, max_groups=max_groups, **{**options, "block_m": block_m})


@contextmanager
def device_stand_in() -> Iterator[list[OperatorRecorder]]:
    """Runners made within are as on such a device, whose scratch memory holds NaN; gives what they record with."""
    recorders: list[OperatorRecorder] = []

    def recorder_for(device: torch.device) -> OperatorRecorder:
        recorders.append(OperatorRecorder())
        return recorders[-1]

    runner, inputs = lora_core.engine.runner, lora_core.inputs
    with (
        patch.object(runner, "paged_layout", triton_layout),
        patch.object(runner, "recorder_for", recorder_for),
        patch.object(inputs, "build_routing", tiled_routing),
        # What is written in C for CPUs is no operator of torch's, and is not recorded.
        patch("kernels.row_operations.row_functions", lambda dtype: None),
        poisoned_empty(),
    ):
        yield recorders
