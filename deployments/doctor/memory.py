"""How a configuration shares a device's memory out, and how many slots and tokens there would be room for."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from cluster.base_model import resolve_path
from cluster.demo.base_model import model_dir
from cluster.schema import DEMO_MODEL
from deployments.doctor.finding import Finding, fault, ok, warning
from deployments.serve_config import ServeConfig
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.engine_plan import plan_engine
from lora_core.engine.runner import rank_device
from lora_core.errors import ConfigError, LoRAFleetError
from lora_core.memory_plan import MemoryPlan, Part, gib
from lora_core.parallel.shard import Shard

MOST_SLOTS = 256
"""What `max_num_loras` may be."""


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's memory, on one of its devices."""

    device: str
    free_bytes: int
    usable_bytes: int
    """Of them, what the engine may take."""
    parts: tuple[Part, ...]
    num_slots: int
    """`max_num_loras`; 0 with LoRA off."""
    most_slots: int
    """There is room for so many beside everything else, with a KV cache as large as is set, or as a request needs."""
    kv_cache_tokens: int
    most_kv_cache_tokens: int
    """There is room for so many beside everything else."""
    tokens_by_slots: dict[int, int]
    """How large the KV cache could be with so many slots."""
    max_model_len: int | None
    num_replicas: int
    """Of the configuration, at its start."""
    lines: tuple[str, ...]
    """The same in words."""


class _Planner(NamedTuple):
    """Plans of one engine with other numbers of slots."""

    engine: EngineConfig
    lora: LoRAConfig
    device: torch.device
    shard: Shard
    free: int | None

    def plan(self, num_slots: int | None = None) -> MemoryPlan:
        """Raises ConfigError: it does not fit."""
        lora = self.lora if num_slots is None else self.lora.model_copy(update={"max_num_loras": num_slots})
        return plan_engine(self.engine, lora, self.device, self.shard, self.free)

    def room(self, num_slots: int | None = None) -> int | None:
        """KV tokens there is room for beside so many slots; None where not even what is set fits."""
        try:
            plan = self.plan(num_slots)
        except ConfigError:
            return None
        kv = next(part for part in plan.parts if part.name == "KV cache")
        left = plan.usable_bytes - plan.reserved_bytes - plan.later_bytes
        block = self.engine.block_size
        tokens = (kv.num_bytes + left) * plan.kv_cache_tokens // kv.num_bytes // block * block
        return tokens if left >= 0 else None

    def most_slots(self) -> int:
        """0: not even one."""
        low, high = 0, MOST_SLOTS
        while low < high:
            middle = (low + high + 1) // 2
            if self.room(middle) is None:
                high = middle - 1
            else:
                low = middle
        return low


def memory_report(config: ServeConfig, gpu_gib: float | None) -> tuple[list[Finding], MemoryReport | None]:
    """Plan one replica's memory, without loading anything.

    Args:
        config: What is to be served.
        gpu_gib: Plan for a GPU with so much free memory, which need not be here; None: for the device that is.
    """
    settings = config.settings
    try:
        folder = _model_folder(settings.model)
        if folder is None:
            return [_not_prepared()], None
        device = torch.device("cuda") if gpu_gib is not None else _device(config)
        planner = _Planner(
            EngineConfig(model=folder, **settings.engine.model_dump()),
            settings.lora_config,
            device,
            Shard(0, settings.engine.tensor_parallel_size),
            None if gpu_gib is None else int(gpu_gib * (1 << 30)),
        )
        report = _report(config, planner)
    except LoRAFleetError as error:
        return [fault("memory", str(error), "see docs/tuning.md")], None
    return list(_findings(config, report, is_here=gpu_gib is None)), report


def _report(config: ServeConfig, planner: _Planner) -> MemoryReport:
    plan = planner.plan()
    num_slots = planner.lora.max_num_loras if planner.lora.enable_lora else 0
    most_slots = planner.most_slots() if num_slots else 0
    candidates = {count for count in (num_slots // 2, num_slots, 2 * num_slots, most_slots) if 0 < count <= most_slots}
    rooms = {count: planner.room(count) for count in sorted(candidates)}
    most_tokens = planner.room()
    report = MemoryReport(
        device=plan.device,
        free_bytes=plan.free_bytes,
        usable_bytes=plan.usable_bytes,
        parts=plan.parts,
        num_slots=num_slots,
        most_slots=most_slots,
        kv_cache_tokens=plan.kv_cache_tokens,
        most_kv_cache_tokens=plan.kv_cache_tokens if most_tokens is None else most_tokens,
        tokens_by_slots={count: room for count, room in rooms.items() if room is not None},
        max_model_len=planner.engine.max_model_len,
        num_replicas=config.num_engines,
        lines=(),
    )
    return msgspec.structs.replace(report, lines=(*plan.lines(), *_sentences(report, planner.lora)))


def _sentences(report: MemoryReport, lora: LoRAConfig) -> Iterator[str]:
    """How many slots and tokens fit, and what one costs the other."""
    if report.num_slots:
        slots = next(part for part in report.parts if part.name == "slots")
        each = gib(slots.num_bytes // report.num_slots)
        yield f"slots: {report.num_slots} of rank {lora.max_lora_rank}, {each} each; {_at_most(report)}"
    requests = ""
    if report.max_model_len is not None:
        whole = report.kv_cache_tokens // report.max_model_len
        requests = f", {whole} requests of max_model_len {report.max_model_len}"
    yield (
        f"KV cache: {report.kv_cache_tokens} tokens{requests}; there is room for {report.most_kv_cache_tokens} "
        "beside everything else"
    )
    if len(report.tokens_by_slots) > 1:
        table = ", ".join(f"{slots}: {tokens}" for slots, tokens in report.tokens_by_slots.items())
        yield f"KV tokens there would be room for, by slots: {table}"


def _at_most(report: MemoryReport) -> str:
    if report.most_slots == MOST_SLOTS:
        return f"there is room for {MOST_SLOTS}, the most that max_num_loras may be"
    if report.most_slots < report.num_slots:
        return f"once all of them and host_memory_bytes are in use, there is room for {report.most_slots}"
    return f"there is room for {report.most_slots}"


def _findings(config: ServeConfig, report: MemoryReport, *, is_here: bool) -> Iterator[Finding]:
    taken = sum(part.num_bytes for part in report.parts)
    text = f"{gib(taken)} of {gib(report.usable_bytes)} on {report.device}, {report.kv_cache_tokens} KV tokens"
    if report.num_slots:
        text += f", {report.num_slots} slots (room for {report.most_slots})"
    if taken > report.usable_bytes:
        yield warning(
            "memory", f"{text}: it starts, and may run out as slots and host memory fill", "lower host_memory_bytes"
        )
    else:
        yield ok("memory", text)
    count = report.num_replicas
    if not is_here or count < 2:
        return
    if report.device.startswith("cpu"):
        if count * taken > report.free_bytes:
            yield warning(
                "replicas",
                f"{count} of them take up to {gib(count * taken)}, and {gib(report.free_bytes)} are free here",
                "lower host_memory_bytes or kv_cache_tokens, start fewer replicas, or have more machines",
            )
    elif count * config.gpus_of_engine > torch.cuda.device_count():
        yield warning(
            "replicas",
            f"{count} of them need {count * config.gpus_of_engine:g} GPUs, and {torch.cuda.device_count()} are here",
            "have other nodes in the Ray cluster, or start fewer replicas",
        )


def _device(config: ServeConfig) -> torch.device:
    """The device of a replica on this machine. Raises ConfigError: there is none such."""
    if config.gpus_of_engine and config.settings.engine.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(
            f"a replica asks Ray for num_gpus {config.gpus_of_engine:g}, and torch finds no GPU here; run this on a "
            "machine with GPUs, or say with --gpu-gib how much memory one has there"
        )
    return rank_device(config.settings.engine.device, 0)


def _model_folder(model: str) -> Path | None:
    """A folder with the base model's config.json; None: the demo's, which is not prepared yet. Raises ConfigError."""
    if model == DEMO_MODEL:
        folder = model_dir()
        return folder if folder.is_dir() else None
    if (found := resolve_path(model)) is not None:
        return found
    repo, _, revision = model.partition("@")
    try:
        return Path(hf_hub_download(repo, "config.json", revision=revision or None)).parent
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model: {model!r} is no folder here, and its config.json is not to be had: {reason}"
        ) from None


def _not_prepared() -> Finding:
    return warning(
        "memory",
        "the demo's model is prepared at the first start, and cannot be planned for before",
        "python -m cluster.demo.base_model prepares it (93 MB are downloaded)",
    )
