"""SGMV (many LoRA adapters applied to one batch, each row through the adapter of its own request), and attention.

`docs/kernels.md` is the page on it.

Hugging Face publishes a package that is also named `kernels`, and transformers probes for it by name and version.
This package therefore sets `__version__`, and its distribution stays below version 0.10.2: transformers then finds a
`kernels` too old for it and goes on without.
"""

from kernels.embedding import sgmv_embed
from kernels.gain import scale_rows
from kernels.linear_cpu import PackedLinear
from kernels.paged_attention import paged_attention
from kernels.paged_attention_tiles import PagedLayout
from kernels.paged_schedule import PagedSchedule, build_paged_schedule
from kernels.schedule import Group, Routing, build_routing
from kernels.sgmv import sgmv, sgmv_expand, sgmv_shrink
from kernels.swiglu import GATED_ACTIVATIONS, sgmv_swiglu

__version__ = "0.1.0"

__all__ = [
    "GATED_ACTIVATIONS",
    "Group",
    "PackedLinear",
    "PagedLayout",
    "PagedSchedule",
    "Routing",
    "build_paged_schedule",
    "build_routing",
    "paged_attention",
    "scale_rows",
    "sgmv",
    "sgmv_embed",
    "sgmv_expand",
    "sgmv_shrink",
    "sgmv_swiglu",
]
