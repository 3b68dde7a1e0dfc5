"""Launches of paged attention to judge, recorded from the op itself."""

from collections.abc import Iterator

import torch

from kernels.paged_attention import paged_attention
from kernels.paged_attention_tiles import PagedLayout
from kernels.paged_schedule import build_paged_schedule
from tests.kernels.sites import Model, Step
from tests.kernels.static.configurations import Configuration
from tests.kernels.static.recording import recorded

_BLOCK_SIZE = 16
_MAX_BLOCKS = 512
"""A sequence's most blocks: 8,192 tokens."""

_KERNELS = {"decode_kernel": "decode", "combine_kernel": "combine", "prefill_kernel": "prefill"}


def attention(model: Model, step: Step, dtype: torch.dtype = torch.bfloat16) -> Iterator[Configuration]:
    """The launches of a step whose rows are shared out evenly: decodes where each group has one row, else prefills."""
    layout = PagedLayout(model.num_heads, model.num_kv_heads, model.head_size, _BLOCK_SIZE, num_blocks=1, dtype=dtype)
    rows = step.num_rows // step.num_groups
    is_decode = rows == 1
    # Which blocks a sequence has means nothing to what is compiled.
    blocks = [0] * -(-rows // _BLOCK_SIZE)
    schedule = build_paged_schedule(
        [rows] * step.num_groups,
        [rows] * step.num_groups,
        [blocks] * step.num_groups,
        layout=layout,
        num_rows=step.num_rows,
        max_sequences=step.num_groups,
        max_blocks=_MAX_BLOCKS,
        max_decodes=step.num_groups if is_decode else 0,
        max_chunks=0 if is_decode else step.num_groups,
        device=torch.device("cpu"),
    )
    queries = torch.empty(step.num_rows, model.num_heads, model.head_size, dtype=dtype)
    cache = torch.empty(layout.cache_shape, dtype=dtype)
    shape = f"{model.name} attention {str(dtype).removeprefix('torch.')} {step}"
    with recorded() as recording:
        paged_attention(
            queries, cache, schedule, scale=model.head_size**-0.5, window=model.window, softcap=model.soft_cap
        )
    for launch in recording.launches:
        if launch.programs:
            kernel = _KERNELS[launch.kernel.fn.__name__]
            has_product = kernel != "combine" and dtype != torch.float32
            yield Configuration(kernel, shape, launch, has_product=has_product)
