"""SGMV: many LoRA adapters applied to one batch, each row through the adapter of its own request.

Hugging Face publishes a package that is also named `kernels`, and transformers probes for it by name and version.
This package therefore sets `__version__`, and its distribution stays below version 0.10.2: transformers then finds a
`kernels` too old for it and goes on without.
"""

from kernels.embedding import sgmv_embed
from kernels.gain import scale_rows
from kernels.linear_cpu import PackedLinear
from kernels.schedule import Group, Routing, build_routing
from kernels.sgmv import sgmv, sgmv_expand, sgmv_shrink

__version__ = "0.1.0"

__all__ = [
    "Group",
    "PackedLinear",
    "Routing",
    "build_routing",
    "scale_rows",
    "sgmv",
    "sgmv_embed",
    "sgmv_expand",
    "sgmv_shrink",
]
