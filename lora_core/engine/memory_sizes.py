"""What `lora_core.memory_plan` needs to know of a model and a device."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch

from lora_core.config import EngineSettings, LoRAConfig
from lora_core.errors import ConfigError
from lora_core.memory_plan import EngineSizes, MemoryPlan, MemorySettings, gib, remedies
from lora_core.models.decoder import DecoderConfig
from lora_core.stacks import stack_dtype
from lora_core.targets import lora_sites

_CGROUP = Path("/sys/fs/cgroup")

_CPU_ALLOCATOR = "DefaultCPUAllocator"
"""Names itself where it has no memory."""

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

_GUESSED_BYTES = 256 << 20
"""Taken to be missing where nobody says how much was asked for."""

_MOST_SPLITS = 2
"""Planes of partial sums that adapters' products leave of a long prompt's rows; steps of few rows have more of them."""


def engine_sizes(
    config: DecoderConfig, engine: EngineSettings, lora: LoRAConfig, *, dtype: torch.dtype, device: torch.device
) -> EngineSizes:
    """The sizes of a decoder, or of a rank's share of it, as this engine holds it."""
    itemsize = dtype.itemsize
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, intermediate = config.hidden_size, config.intermediate_size
    stack_itemsize = stack_dtype(dtype, device).itemsize
    sites = lora_sites(config.targets, config.projections, config.num_layers)
    ranks = {site: len(site.slices) * site.in_features + site.out_features for site in sites}
    attention = 3 * hidden + 2 * (query + 2 * kv) + query
    mlp = 3 * hidden + 5 * intermediate
    planes = 4 * _MOST_SPLITS * 3 * lora.max_lora_rank if lora.enable_lora else 0
    return EngineSizes(
        weights=_weight_bytes(config, engine, itemsize, device),
        slot_rank=stack_itemsize * sum(ranks.values()),
        slot_rank_embeddings=stack_itemsize * sum(size for site, size in ranks.items() if site.kind != "layer"),
        slot_gains=4 * sum(site.out_features for site in sites),
        kv_token=config.num_layers * 2 * kv * itemsize,
        row=itemsize * max(attention, mlp) + planes,
        # The head's output, the same in fp32, and what sampling makes of it.
        logits_row=config.vocab_size * (itemsize + 3 * 4),
    )


def memory_settings(
    engine: EngineSettings, lora: LoRAConfig, *, max_model_len: int, num_graphs: int, attention_bytes: int = 0
) -> MemorySettings:
    """The settings that matter, with what they are where they are unset."""
    return MemorySettings(
        max_num_loras=lora.max_num_loras if lora.enable_lora else 0,
        max_lora_rank=lora.max_lora_rank,
        max_model_len=max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        block_size=engine.block_size,
        kv_cache_tokens=engine.kv_cache_tokens,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        num_graphs=num_graphs,
        attention_bytes=attention_bytes,
        host_memory_bytes=lora.host_memory_bytes,
    )


def free_bytes(device: torch.device) -> int:
    """What is free of a device's memory; on the CPU no more than the control group of this process leaves it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError, KeyError):
        limit = int((_CGROUP / "memory.max").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        used = int((_CGROUP / "memory.current").read_text()) - int(stat["inactive_file"])
        available = min(available, max(0, limit - used))
    return available


@contextmanager
def memory_faults(plan: MemoryPlan) -> Iterator[None]:
    """Within the block, a device that runs out of memory all the same is a ConfigError that says what to set."""
    try:
        yield
    # On a CPU torch raises a plain RuntimeError, and numpy a MemoryError.
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not _is_of_memory(error):
            raise
        raise ConfigError(_fault(plan, str(error) or type(error).__name__)) from error


def _is_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or _CPU_ALLOCATOR in str(error)


def _fault(plan: MemoryPlan, said: str) -> str:
    """What to set where more memory was asked for than there was, in the words of whoever was asked."""
    what = said.strip().splitlines()[0]
    missing = _asked_bytes(what) or _GUESSED_BYTES
    table = "\n".join(plan.lines())
    enough = remedies(plan, missing)
    if not enough:
        enough = ["use a smaller or quantised model (engine.quantization), or more devices"]
    return (
        f"{plan.device} ran out of memory at start ({what}), although {gib(plan.reserved_bytes)} of "
        f"{gib(plan.usable_bytes)} were planned: see what else uses the device; or free {gib(missing)}, for which any "
        f"one of these is enough: {'; or '.join(enough)}\n{table}"
    )


def _asked_bytes(said: str) -> int | None:
    """How many bytes an allocator says were asked of it."""
    found = re.search(r"(\d+(?:\.\d+)?) ?(bytes|[KMG]iB)", said)
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def _weight_bytes(config: DecoderConfig, engine: EngineSettings, itemsize: int, device: torch.device) -> int:
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, intermediate = config.hidden_size, config.intermediate_size
    outputs = query + 2 * kv + 2 * hidden + 2 * intermediate
    weights = hidden * (2 * query + 2 * kv + 3 * intermediate)
    if engine.quantization == "int8":
        # A scale for each output.
        layer = float(weights + outputs * itemsize)
    elif engine.quantization == "int4":
        # A scale and a zero for each group, of 64 at most half of the time.
        layer = weights / 2 + 2 * itemsize * weights / 64
    else:
        layer = float(weights * itemsize)
    small = (outputs + 4 * hidden + 2 * config.head_dim) * itemsize
    table = config.vocab_size * hidden * itemsize
    is_packed = device.type == "cpu" and engine.pack_weights
    # Reordered for the CPU's matrix kernels, a tied head is a copy of its own.
    num_tables = 1 if config.tied_head and not is_packed else 2
    return int(config.num_layers * (layer + small) + num_tables * table + hidden * itemsize)
