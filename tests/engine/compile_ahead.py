"""`python -m tests.engine.compile_ahead`: compile some of an engine's kernel variants for a GPU that is not here."""

import json
import sys
from itertools import islice

import torch
from triton.runtime import driver

from kernels.tuning import meta_device
from lora_core.engine.kernel_variants import AdapterKernels, compile_all, distinct
from lora_core.targets import LLAMA_TARGETS, lora_sites
from tests.kernels.static.targets import SM_90, StandInDriver

PROJECTIONS = {
    **dict.fromkeys(("q_proj", "o_proj", "lm_head"), (64, 64)),
    **dict.fromkeys(("k_proj", "v_proj"), (32, 64)),
    **dict.fromkeys(("gate_proj", "up_proj"), (96, 64)),
    "down_proj": (64, 96),
    "embed_tokens": (64, 128),
}


def main() -> int:
    """Print how many were compiled, and what was told of it."""
    driver.set_active(StandInDriver(SM_90))
    adapters = AdapterKernels(
        sites=lora_sites(LLAMA_TARGETS, PROJECTIONS, 1),
        num_slots=4,
        max_groups=4,
        rank=16,
        activation="silu",
        biases=frozenset(),
        one_launch=False,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
    )
    told: list[tuple[str, int, int]] = []
    with meta_device(SM_90.device):
        launches = list(islice(distinct(adapters.launches(32)), 4))
        compile_all(launches, lambda *progress: told.append(progress))
    caches = {id(launch.kernel): launch.kernel.device_caches[0][0] for launch in launches}
    compiled = [kernel for cache in caches.values() for kernel in cache.values()]
    print(
        json.dumps(
            {"launches": len(launches), "cubins": [len(kernel.asm["cubin"]) for kernel in compiled], "told": told}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
