"""What the parts of an engine take of a device's memory, worked out before any of it is taken.

Numbers alone: nothing here asks a device or loads a model, so that a plan can be made for a machine that is not here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lora_core.errors import ConfigError

CPU_KV_CACHE_TOKENS = 16384
"""Tokens of the KV cache on a CPU where nothing is set: its memory is other programs' too."""

LIBRARY_BYTES = 256 << 20
"""On a GPU: compiled kernels and the matrix library's workspaces. A guess, and not measured."""

GRAPH_BYTES = 4 << 20
"""What a captured graph takes beside its buffers. A guess, and not measured."""


@dataclass(frozen=True, kw_only=True)
class EngineSizes:
    """What is known of an engine's model and its share on one device; bytes.

    Attributes:
        weights: The base model, as it is held.
        slot_rank: Of one adapter slot for each rank: A and B of every adapted layer.
        slot_rank_embeddings: The part of it that is the embedding's and the head's.
        slot_gains: Of one adapter slot whatever its rank.
        kv_token: Keys and values of one token, in all layers.
        row: Most that a step holds of one token row at a time.
        logits_row: The same of one row whose logits are asked for.
    """

    weights: int
    slot_rank: int
    slot_rank_embeddings: int
    slot_gains: int
    kv_token: int
    row: int
    logits_row: int


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """The settings that decide how much memory an engine takes, by their names, and how many graphs it captures.

    `attention_bytes` is what an attention library takes for itself; `max_num_loras` is 0 with LoRA off;
    `kv_cache_tokens` is None where the rest of the memory is the KV cache's.
    """

    max_num_loras: int
    max_lora_rank: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_cache_tokens: int | None
    gpu_memory_utilization: float = 1.0
    num_graphs: int = 0
    attention_bytes: int = 0
    host_memory_bytes: int = 0


@dataclass(frozen=True)
class Part:
    """One part of an engine's memory.

    Attributes:
        name: What it is.
        num_bytes: What it takes.
        why: Which settings and sizes it follows from.
        is_reserved: Whether it is taken at start; other parts come with use.
    """

    name: str
    num_bytes: int
    why: str
    is_reserved: bool = True


@dataclass(frozen=True)
class MemoryPlan:
    """What an engine takes of one device.

    Attributes:
        device: Its name.
        free_bytes: Free there before the start.
        usable_bytes: What of it the engine may take.
        parts: What it takes.
        kv_cache_tokens: What its KV cache holds; whole blocks.
        sizes: Of the model.
        settings: That were planned with.
    """

    device: str
    free_bytes: int
    usable_bytes: int
    parts: tuple[Part, ...]
    kv_cache_tokens: int
    sizes: EngineSizes
    settings: MemorySettings

    @property
    def is_gpu(self) -> bool:
        """Whether slots are allocated whole, and the KV cache may have what is left."""
        return not self.device.startswith("cpu")

    @property
    def reserved_bytes(self) -> int:
        """All that is taken at start."""
        return sum(part.num_bytes for part in self.parts if part.is_reserved)

    @property
    def later_bytes(self) -> int:
        """The most that may be taken in use."""
        return sum(part.num_bytes for part in self.parts if not part.is_reserved)

    def lines(self) -> Iterator[str]:
        """The plan as a table."""
        yield f"memory of {self.device}: {gib(self.free_bytes)} free, {gib(self.usable_bytes)} of it for this engine"
        for part in self.parts:
            later = "" if part.is_reserved else ", taken as it is used"
            yield f"  {part.name:<12} {gib(part.num_bytes):>10}  {part.why}{later}"
        left = self.usable_bytes - self.reserved_bytes
        yield f"  {'left':<12} {gib(left):>10}"


def plan_memory(sizes: EngineSizes, settings: MemorySettings, *, device: str, free_bytes: int) -> MemoryPlan:
    """Share a device's memory out.

    On a GPU (any device whose name does not begin with "cpu") adapter slots are allocated whole and the KV cache gets
    the rest; on a CPU slots take memory as they are used.

    Args:
        sizes: Of the model.
        settings: Of the engine; none of them is changed.
        device: As torch names it.
        free_bytes: What is free there before the engine has taken any.

    Raises:
        ConfigError: it does not fit. The sentence has each part, and for every setting that could help alone how far
            it would have to go; where none could, how far all would have to go together.
    """
    plan = _share_out(sizes, settings, device=device, free_bytes=free_bytes)
    if plan.reserved_bytes > plan.usable_bytes:
        raise ConfigError(_refusal(plan))
    return plan


def remedies(plan: MemoryPlan, num_bytes: int) -> list[str]:
    """What to set so that an engine takes `num_bytes` less than planned; any one of these is enough."""
    if plan.is_gpu and plan.settings.kv_cache_tokens is None:
        # Whatever else is lowered, the KV cache gets it.
        return list(_lower_share(plan, num_bytes))
    return list(_lower_settings(plan, num_bytes))


def _share_out(sizes: EngineSizes, settings: MemorySettings, *, device: str, free_bytes: int) -> MemoryPlan:
    """The plan, whether or not it fits."""
    is_gpu = not device.startswith("cpu")
    usable = int(free_bytes * settings.gpu_memory_utilization) if is_gpu else free_bytes
    if not is_gpu and settings.kv_cache_tokens is None:
        settings = replace(settings, kv_cache_tokens=CPU_KV_CACHE_TOKENS)
    parts = _parts_but_kv(sizes, settings, is_gpu)
    spare = usable - sum(part.num_bytes for part in parts if part.is_reserved)
    num_tokens = settings.kv_cache_tokens
    if num_tokens is None:
        # A request of the greatest length must fit, or no limit that was promised would hold.
        num_tokens = max(spare // sizes.kv_token // settings.block_size * settings.block_size, settings.max_model_len)
    num_blocks = -(-num_tokens // settings.block_size)
    tokens = num_blocks * settings.block_size
    why = "kv_cache_tokens" if settings.kv_cache_tokens is not None else "what is left"
    kv = Part("KV cache", tokens * sizes.kv_token, f"{tokens} tokens of {sizes.kv_token} bytes ({why})")
    return MemoryPlan(device, free_bytes, usable, (parts[0], kv, *parts[1:]), tokens, sizes, settings)


def _parts_but_kv(sizes: EngineSizes, settings: MemorySettings, is_gpu: bool) -> list[Part]:
    """Everything beside the KV cache, the weights first."""
    parts = [Part("weights", sizes.weights, "the base model")]
    if settings.max_num_loras:
        slots = f"max_num_loras {settings.max_num_loras}, max_lora_rank {settings.max_lora_rank}"
        parts.append(Part("slots", settings.max_num_loras * _slot_bytes(sizes, settings), slots, is_gpu))
    logits_rows = max(settings.max_num_batched_tokens, settings.max_num_seqs)
    activations = settings.max_num_batched_tokens * sizes.row + logits_rows * sizes.logits_row
    parts.append(Part("activations", activations, f"max_num_batched_tokens {settings.max_num_batched_tokens}"))
    if is_gpu:
        parts.append(Part("libraries", LIBRARY_BYTES, "kernels and workspaces, about"))
    if settings.attention_bytes:
        parts.append(Part("attention", settings.attention_bytes, "workspaces of attention_backend"))
    if settings.num_graphs:
        buffers = settings.num_graphs * GRAPH_BYTES + settings.max_num_seqs * sizes.row
        parts.append(Part("graphs", buffers, f"{settings.num_graphs} graphs, about"))
    if settings.max_num_loras and not is_gpu:
        parts.append(Part("adapters", settings.host_memory_bytes, "host_memory_bytes", False))
    return parts


def _slot_bytes(sizes: EngineSizes, settings: MemorySettings) -> int:
    return settings.max_lora_rank * sizes.slot_rank + sizes.slot_gains


def _refusal(plan: MemoryPlan) -> str:
    """Why the engine does not start, and what to set."""
    missing = plan.reserved_bytes - plan.usable_bytes
    parts = ", ".join(f"{part.name} {gib(part.num_bytes)}" for part in plan.parts if part.is_reserved)
    share = f" (gpu_memory_utilization {plan.settings.gpu_memory_utilization:g} of them)" if plan.is_gpu else ""
    found = (
        f"the engine needs {gib(plan.reserved_bytes)} of {plan.device} and may take {gib(plan.usable_bytes)} of the "
        f"{gib(plan.free_bytes)} that are free{share}: {gib(missing)} are missing, with {parts}"
    )
    enough = [*_raise_share(plan), *_lower_settings(plan, missing)]
    if enough:
        return f"{found}; any one of these is enough: {'; or '.join(enough)}"
    smaller = "a smaller or quantised model (engine.quantization), or more devices (engine.tensor_parallel_size)"
    together, is_enough = _together(plan)
    if is_enough:
        return f"{found}; no single setting is enough: lower {together}, all together, or use {smaller}"
    least = f"even with {together}" if together else "whatever is set"
    return f"{found}; no setting is enough ({least} it does not fit): use {smaller}"


def _raise_share(plan: MemoryPlan) -> Iterator[str]:
    """The share of a GPU's memory that the plan fits in, if there is one."""
    needed = plan.reserved_bytes / max(1, plan.free_bytes)
    # Some of a device's memory is always lost between allocations.
    if plan.is_gpu and needed <= 0.98:
        yield f"raise gpu_memory_utilization to {-(-needed * 1000 // 1) / 1000:g}"


def _lower_share(plan: MemoryPlan, num_bytes: int) -> Iterator[str]:
    """The share of a GPU's memory that leaves so much more to others, and what else is to be lowered for it."""
    share = plan.settings.gpu_memory_utilization
    lower = (share - num_bytes / plan.free_bytes) * 1000 // 1 / 1000
    if lower <= 0:
        return
    settings = replace(plan.settings, gpu_memory_utilization=lower)
    less = _share_out(plan.sizes, settings, device=plan.device, free_bytes=plan.free_bytes)
    missing = less.reserved_bytes - less.usable_bytes
    said = f"lower gpu_memory_utilization from {share:g} to {lower:g}"
    if missing > 0:
        yield from (f"{said} and {other}" for other in _lower_settings(less, missing))
        return
    yield said
    yield f"set kv_cache_tokens, of which there are {plan.kv_cache_tokens} now, to {less.kv_cache_tokens}"


def _lower_settings(plan: MemoryPlan, missing: int) -> Iterator[str]:
    """For each setting that alone frees so much: what to lower it to."""
    sizes, settings = plan.sizes, plan.settings
    if plan.is_gpu:
        yield from _lower_slots(sizes, settings, missing)
    needed_tokens, name = _needed_tokens(plan)
    spare = needed_tokens * sizes.kv_token - missing
    fewer = spare // sizes.kv_token // settings.block_size * settings.block_size
    if settings.block_size <= fewer < needed_tokens:
        yield f"lower {name} from {needed_tokens} to {fewer}"
    row = sizes.row + sizes.logits_row
    rows = settings.max_num_batched_tokens - -(-missing // row)
    if rows >= settings.max_num_seqs:
        yield f"lower max_num_batched_tokens from {settings.max_num_batched_tokens} to {rows}"


def _needed_tokens(plan: MemoryPlan) -> tuple[int, str]:
    """Tokens that the KV cache has to hold, and the setting that says so."""
    if plan.settings.kv_cache_tokens is None:
        return plan.settings.max_model_len, "max_model_len"
    return plan.kv_cache_tokens, "kv_cache_tokens"


def _lower_slots(sizes: EngineSizes, settings: MemorySettings, missing: int) -> Iterator[str]:
    if not settings.max_num_loras:
        return
    slots = settings.max_num_loras - -(-missing // _slot_bytes(sizes, settings))
    if slots >= 1:
        yield f"lower max_num_loras from {settings.max_num_loras} to {slots}"
    rank = settings.max_lora_rank - -(-missing // (settings.max_num_loras * sizes.slot_rank))
    # Kernels take ranks in eights.
    rank = rank // 8 * 8 if rank >= 8 else rank
    if rank >= 1:
        yield f"lower max_lora_rank from {settings.max_lora_rank} to {rank}"
    if settings.max_num_loras * settings.max_lora_rank * sizes.slot_rank_embeddings >= missing:
        yield "set adapt_embeddings to false"


def _together(plan: MemoryPlan) -> tuple[str, bool]:
    """All settings that matter, halved until the plan fits or they can be halved no more, and whether it then fits."""
    settings, lowered, is_enough = plan.settings, plan.settings, False
    while not is_enough and (halved := _halved(lowered, plan.is_gpu)) != lowered:
        lowered = halved
        tried = _share_out(plan.sizes, lowered, device=plan.device, free_bytes=plan.free_bytes)
        is_enough = tried.reserved_bytes <= tried.usable_bytes
    names = ("max_num_loras", "max_lora_rank", "max_model_len", "kv_cache_tokens", "max_num_batched_tokens")
    pairs = ((name, getattr(settings, name), getattr(lowered, name)) for name in names)
    return ", ".join(f"{name} from {old} to {new}" for name, old, new in pairs if new != old), is_enough


def _halved(settings: MemorySettings, is_gpu: bool) -> MemorySettings:
    """About half of every setting that takes memory at start, as far as it can be lowered."""
    kv_tokens, block = settings.kv_cache_tokens, settings.block_size
    if is_gpu and settings.max_num_loras:
        ranks = _half(settings.max_lora_rank, 8) // 8 * 8 or settings.max_lora_rank
        settings = replace(settings, max_num_loras=_half(settings.max_num_loras, 1), max_lora_rank=ranks)
    if kv_tokens is None:
        settings = replace(settings, max_model_len=_half(settings.max_model_len, block))
    else:
        settings = replace(settings, kv_cache_tokens=_half(kv_tokens, block))
    return replace(settings, max_num_batched_tokens=_half(settings.max_num_batched_tokens, settings.max_num_seqs))


def _half(number: int, least: int) -> int:
    """Half of a number, but `least` at least, or the number itself where that is less."""
    return max(number // 2, min(least, number))


def gib(num_bytes: int) -> str:
    """A number of bytes for people."""
    if abs(num_bytes) >= 1 << 30:
        return f"{num_bytes / (1 << 30):.2f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB"
