"""The memory plan: what each part takes, and what is said where it does not fit."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.flashinfer_attention import WORKSPACE_BYTES
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.engine_plan import plan_engine
from lora_core.engine.memory_sizes import engine_sizes, free_bytes, memory_faults, memory_settings
from lora_core.engine.runner import ModelRunner
from lora_core.errors import ConfigError
from lora_core.memory_plan import CPU_KV_CACHE_TOKENS, EngineSizes, MemoryPlan, MemorySettings, plan_memory
from lora_core.models.decoder import DecoderConfig, LayerConfig
from lora_core.models.rotary import RotaryTable
from lora_core.models.weights import load_decoder
from lora_core.targets import LLAMA_TARGETS

GIB = 1 << 30
CUDA = torch.device("cuda")

LLAMA_3_8B = DecoderConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    layers=(LayerConfig(),) * 32,
    rotary_tables=(RotaryTable((1.0,) * 64),),
    max_model_len=8192,
    norm_eps=1e-5,
    activation="silu",
    attention_scale=128**-0.5,
    tied_head=False,
    targets=LLAMA_TARGETS,
)
SIZES = EngineSizes(
    weights=16 * GIB,
    slot_rank=6 << 20,
    slot_rank_embeddings=1 << 20,
    slot_gains=2 << 20,
    kv_token=1 << 17,
    row=1 << 18,
    logits_row=1 << 20,
)
SETTINGS = MemorySettings(
    max_num_loras=8, max_lora_rank=16, max_model_len=8192, max_num_seqs=64, max_num_batched_tokens=512, block_size=16,
    kv_cache_tokens=None, gpu_memory_utilization=0.9, num_graphs=30,
)  # fmt: skip


def follow(settings: MemorySettings, remedy: str) -> MemorySettings:
    """The settings after what a refusal says to do."""
    found = re.fullmatch(r"(?:raise|lower|set) (\w+)(?: from [\d.]+)? to ([\d.]+)", remedy)
    assert found is not None, remedy
    name, value = found.groups()
    number = float(value) if name == "gpu_memory_utilization" else int(value)
    assert number != getattr(settings, name)
    return replace(settings, **{name: number})  # type: ignore[arg-type]


def part(plan: MemoryPlan, name: str) -> int:
    (found,) = [part.num_bytes for part in plan.parts if part.name == name]
    return found


def test_the_kv_cache_gets_what_is_left_of_a_gpu() -> None:
    plan = plan_memory(SIZES, SETTINGS, device="cuda:0", free_bytes=80 * GIB)
    assert plan.usable_bytes == int(72 * GIB)
    assert part(plan, "weights") == 16 * GIB
    assert part(plan, "slots") == 8 * (16 * SIZES.slot_rank + SIZES.slot_gains)
    assert part(plan, "KV cache") == plan.kv_cache_tokens * SIZES.kv_token
    assert plan.kv_cache_tokens % 16 == 0
    # Not a block more would fit.
    assert 0 <= plan.usable_bytes - plan.reserved_bytes < 16 * SIZES.kv_token
    assert plan.later_bytes == 0


def test_a_number_of_tokens_that_is_set_is_kept() -> None:
    plan = plan_memory(SIZES, replace(SETTINGS, kv_cache_tokens=1000), device="cuda", free_bytes=80 * GIB)
    assert plan.kv_cache_tokens == 1008
    table = "\n".join(plan.lines())
    assert "1008 tokens" in table
    assert "max_num_loras 8, max_lora_rank 16" in table
    assert re.search(r"left +\d+\.\d+ GiB", table)


def test_on_a_cpu_slots_come_with_use() -> None:
    settings = replace(SETTINGS, num_graphs=0, host_memory_bytes=5 * GIB)
    plan = plan_memory(SIZES, settings, device="cpu", free_bytes=20 * GIB)
    assert plan.usable_bytes == plan.free_bytes
    assert plan.kv_cache_tokens == CPU_KV_CACHE_TOKENS
    later = {part.name: part.num_bytes for part in plan.parts if not part.is_reserved}
    assert later == {"slots": 8 * (16 * SIZES.slot_rank + SIZES.slot_gains), "adapters": 5 * GIB}
    assert plan.later_bytes == sum(later.values())


@given(
    free=st.integers(10 * GIB, 24 * GIB),
    loras=st.integers(0, 64),
    rank=st.sampled_from([4, 16, 64, 256]),
    kv_cache_tokens=st.one_of(st.none(), st.integers(1, 100_000)),
    length=st.integers(16, 60_000),
    share=st.sampled_from([0.5, 0.9, 1.0]),
    is_gpu=st.booleans(),
)
def test_whatever_is_said_to_be_enough_is_enough(
    free: int, loras: int, rank: int, kv_cache_tokens: int | None, length: int, share: float, is_gpu: bool
) -> None:
    """Each remedy of a refusal is tried, and none leaves the plan as it was."""
    settings = replace(
        SETTINGS, max_num_loras=loras, max_lora_rank=rank, kv_cache_tokens=kv_cache_tokens, max_model_len=length,
        gpu_memory_utilization=share,
    )  # fmt: skip
    device = "cuda:0" if is_gpu else "cpu"
    sizes = replace(SIZES, weights=8 * GIB)
    try:
        plan = plan_memory(sizes, settings, device=device, free_bytes=free)
    except ConfigError as error:
        said = str(error)
    else:
        assert plan.reserved_bytes <= plan.usable_bytes
        assert kv_cache_tokens is None or plan.kv_cache_tokens >= kv_cache_tokens
        return
    assert re.search(r"[\d.]+ [GM]iB are missing", said)
    _, is_some, remedies = said.partition("any one of these is enough: ")
    if not is_some:
        together = re.search(r"no single setting is enough: lower (.*), all together, or use", said)
        if together is None:
            assert "no setting is enough" in said
            least = replace(
                settings, max_num_loras=min(1, loras), max_lora_rank=4, max_num_batched_tokens=64,
                kv_cache_tokens=None if kv_cache_tokens is None else 1, max_model_len=1,
            )  # fmt: skip
            with pytest.raises(ConfigError):
                plan_memory(sizes, least, device=device, free_bytes=free)
            return
        changed = settings
        for lowered in together[1].split(", "):
            changed = follow(changed, f"lower {lowered}")
        plan_memory(sizes, changed, device=device, free_bytes=free)
        return
    for remedy in remedies.split("; or "):
        if "adapt_embeddings" in remedy:
            changed, tried = settings, replace(sizes, slot_rank=sizes.slot_rank - sizes.slot_rank_embeddings)
        else:
            changed, tried = follow(settings, remedy), sizes
        plan_memory(tried, changed, device=device, free_bytes=free)


def test_a_refusal_has_the_parts_and_the_numbers() -> None:
    with pytest.raises(ConfigError) as refused:
        plan_memory(SIZES, replace(SETTINGS, max_num_loras=64), device="cuda:0", free_bytes=26 * GIB)
    said = str(refused.value)
    for words in (
        r"needs \d+\.\d+ GiB of cuda:0 and may take 23\.40 GiB of the 26\.00 GiB",
        r"weights 16\.00 GiB",
        r"slots 6\.12 GiB",
        r"lower max_num_loras from 64 to \d+",
        r"lower max_lora_rank from 16 to 8",
        r"raise gpu_memory_utilization to 0\.9\d+",
    ):
        assert re.search(words, said), words


def test_a_model_that_is_too_large_says_so() -> None:
    with pytest.raises(ConfigError, match=r"no setting is enough .*quantised model.*tensor_parallel_size"):
        plan_memory(SIZES, SETTINGS, device="cuda:0", free_bytes=10 * GIB)


def test_where_no_setting_is_enough_alone_all_are_told_together() -> None:
    large = replace(SETTINGS, max_num_loras=64, max_lora_rank=64, max_model_len=65536)
    with pytest.raises(ConfigError, match="no single setting is enough") as refused:
        plan_memory(SIZES, large, device="cuda:0", free_bytes=21 * GIB)
    lowered = "max_num_loras from 64 to 8, max_lora_rank from 64 to 8, max_model_len from 65536 to 8192"
    assert f"lower {lowered}, max_num_batched_tokens from 512 to 64, all together" in str(refused.value)


# Sizes


def test_the_weights_of_a_large_model_are_as_is_known() -> None:
    """Llama-3-8B has 8,030,261,248 parameters, and 128 KiB of keys and values for each token."""
    engine = EngineConfig(model=Path("m"))
    sizes = engine_sizes(LLAMA_3_8B, engine, LoRAConfig(), dtype=torch.bfloat16, device=CUDA)
    assert sizes.weights == pytest.approx(2 * 8_030_261_248, rel=1e-3)
    assert sizes.kv_token == 128 << 10
    quantised = engine.model_copy(update={"quantization": "int8"})
    smaller = engine_sizes(LLAMA_3_8B, quantised, LoRAConfig(), dtype=torch.bfloat16, device=CUDA)
    assert 0.5 < smaller.weights / sizes.weights < 0.6


def test_slots_take_what_their_tensors_take(tiny_base: Path, tiny_adapters: dict[str, Path]) -> None:
    lora = LoRAConfig(enable_lora=True, max_num_loras=3, max_lora_rank=8)
    config = EngineConfig(model=tiny_base, device="cpu", dtype="float32", kv_cache_tokens=64)
    runner = ModelRunner(config, lora)
    slots = sum(tensor.nbytes for tensor in runner.manager.input_buffers()[3:])
    assert part(runner.plan, "slots") == slots
    cache = sum(layer[:, : runner.num_blocks].nbytes for layer in runner.kv_cache.layers)
    assert part(runner.plan, "KV cache") == cache
    # Plain weights: without a copy of the tied head for the matrix kernels.
    plain = ModelRunner(config.model_copy(update={"pack_weights": False}), LoRAConfig())
    decoder, _ = load_decoder(tiny_base, dtype=torch.float32, device=torch.device("cpu"), pack=False)
    held = {tensor.data_ptr(): tensor.nbytes for tensor in decoder.state_dict().values()}
    assert part(plain.plan, "weights") == pytest.approx(sum(held.values()), rel=0.02)


def test_an_engine_that_does_not_fit_is_not_begun(tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_core.engine.engine_plan.free_bytes", lambda device: 1 << 20)
    monkeypatch.setattr("lora_core.engine.runner.load_decoder", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match=r"of cpu and may take 1\.0 MiB .* kv_cache_tokens from 16384 to 512"):
        ModelRunner(EngineConfig(model=tiny_base, device="cpu", kv_cache_tokens=16384), LoRAConfig())


def test_what_an_attention_library_takes_is_not_the_kv_caches(tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_core.engine.engine_plan.free_bytes", lambda device: 4 * GIB)
    plans = [
        plan_engine(EngineConfig(model=tiny_base, attention_backend=backend), LoRAConfig(), CUDA)
        for backend in ("triton", "flashinfer")
    ]
    assert part(plans[1], "attention") > WORKSPACE_BYTES
    assert plans[1].kv_cache_tokens < plans[0].kv_cache_tokens
    assert plans[1].reserved_bytes == pytest.approx(plans[0].reserved_bytes, rel=0.01)


def test_the_kv_cache_has_a_size_where_nothing_is_set(tiny_base: Path) -> None:
    runner = ModelRunner(EngineConfig(model=tiny_base, device="cpu"), LoRAConfig())
    assert runner.num_blocks * 16 == CPU_KV_CACHE_TOKENS
    settings = memory_settings(EngineConfig(model=tiny_base), LoRAConfig(), max_model_len=512, num_graphs=0)
    assert settings.max_num_loras == 0
    assert settings.kv_cache_tokens is None


@pytest.mark.parametrize(
    ("fault", "num_bytes"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB\nmore"), 2 * GIB),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), 20 << 20),
        (torch.OutOfMemoryError("of other words"), 256 << 20),
    ],
)
def test_memory_that_runs_out_all_the_same_says_what_to_set_to_how_much(fault: Exception, num_bytes: int) -> None:
    plan = plan_memory(SIZES, SETTINGS, device="cuda:0", free_bytes=80 * GIB)
    with pytest.raises(ConfigError, match="cuda:0 ran out of memory at start") as refused, memory_faults(plan):
        raise fault
    said, _, table = str(refused.value).partition("\n")
    assert "KV cache" in table
    _, _, enough = said.partition("any one of these is enough: ")
    share, tokens = enough.split("; or ")
    assert "gpu_memory_utilization from 0.9 to 0.8" in share
    for remedy in (share, tokens.replace(f", of which there are {plan.kv_cache_tokens} now,", "")):
        less = plan_memory(SIZES, follow(SETTINGS, remedy), device="cuda:0", free_bytes=80 * GIB)
        assert less.reserved_bytes <= plan.usable_bytes - num_bytes


def test_where_the_cache_cannot_do_without_memory_something_else_is_lowered_too() -> None:
    plan = plan_memory(SIZES, SETTINGS, device="cuda:0", free_bytes=int(21.2 * GIB))
    with pytest.raises(ConfigError, match="ran out of memory") as refused, memory_faults(plan):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
    _, _, enough = str(refused.value).partition("any one of these is enough: ")
    (only,) = enough.partition("\n")[0].split("; or ")
    share, other = only.split(" and ")
    assert "gpu_memory_utilization" in share
    assert "max_model_len" in other
    less = plan_memory(SIZES, follow(follow(SETTINGS, share), other), device="cuda:0", free_bytes=plan.free_bytes)
    assert less.reserved_bytes <= plan.usable_bytes - GIB


def test_a_set_size_of_the_cache_is_lowered_where_memory_runs_out() -> None:
    settings = replace(SETTINGS, kv_cache_tokens=100_000)
    plan = plan_memory(SIZES, settings, device="cuda:0", free_bytes=80 * GIB)
    with pytest.raises(ConfigError, match="lower kv_cache_tokens from 100000 to 83616") as refused, memory_faults(plan):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert "gpu_memory_utilization from" not in str(refused.value)


def test_memory_that_a_cpu_lacks_is_told_as_such() -> None:
    plan = plan_memory(SIZES, SETTINGS, device="cpu", free_bytes=80 * GIB)
    with pytest.raises(ConfigError, match=r"at start .*you tried to allocate"), memory_faults(plan):
        torch.empty(1 << 60)
    with pytest.raises(ConfigError, match=r"at start .*Unable to allocate"), memory_faults(plan):
        np.zeros(1 << 58)
    with pytest.raises(RuntimeError, match=r"size mismatch|shapes cannot"), memory_faults(plan):
        torch.zeros(2, 3) @ torch.zeros(2, 3)


def test_free_memory_keeps_to_the_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_core.engine.memory_sizes._CGROUP", tmp_path)
    plain = free_bytes(torch.device("cpu"))
    assert plain > 1 << 20
    for name, content in (("memory.max", "3000"), ("memory.current", "1500"), ("memory.stat", "inactive_file 500\n")):
        (tmp_path / name).write_text(content)
    assert free_bytes(torch.device("cpu")) == 2000
    (tmp_path / "memory.max").write_text("max")
    assert free_bytes(torch.device("cpu")) > 1 << 20
