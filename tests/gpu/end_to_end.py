"""The engine on a device: answers with graphs are those without, and how fast a large model decodes with adapters.

The model has random weights, made on the device: nothing is downloaded. All adapters are one random folder under many
names, so that each has a slot, and memory, of its own.
"""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lora_core.engine.runner
from kernels import PagedLayout
from kernels.flashinfer_attention import library_fault, open_flashinfer
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.engine import LLMEngine
from lora_core.engine.request import Request, ScheduledBatch, ScheduledRow
from lora_core.engine.runner import ModelRunner
from lora_core.messages import GenerateRequest, SamplingParams
from lora_core.models.architectures import decoder_config, read_hf_config
from lora_core.models.decoder import Decoder, DecoderConfig
from lora_core.types import AdapterRef, LoRAStatus
from tests.bench.random_adapter import write_adapter
from tests.bench.result import report, require
from tests.gpu import floors
from tests.gpu.clock import Clock
from tests.gpu.parts import Say, say_json
from tests.gpu.stage import Stage
from tests.kernels.sites import LLAMA_3_8B, Model

RANK, MAX_ADAPTERS = 16, 64
ROOFLINE_GOAL, LORA_GOAL = 0.7, 0.9
"""Share of the memory's bandwidth that a decode step reaches at least; its base-only time over its time."""


@dataclass(frozen=True)
class Scale:
    """How large a run is.

    Attributes:
        model: Widths of the timed decoder.
        num_layers: Its layers.
        rows: Sequences of the timed steps.
        adapters: Adapters of the timed steps, at most as many as there are sequences.
        context: Tokens of each sequence.
        repeats: Timed steps.
        dtype: Of the timed model.
    """

    model: Model
    num_layers: int
    rows: tuple[int, ...]
    adapters: tuple[int, ...]
    context: int
    repeats: int
    dtype: str


FULL = Scale(LLAMA_3_8B, 32, (1, 8, 64, 256), (0, 8, 64), 512, 30, "bfloat16")
TINY = Scale(Model("tiny", 64, 4, 2, 16, 96, 128), 1, (1, 3), (0, 2), 9, 1, "float32")


class Point(NamedTuple):
    """A decode step: its rows, and how many adapters share them."""

    rows: int
    adapters: int


def points(scale: Scale) -> list[Point]:
    """What is timed; steps without adapters come before those that are compared with them."""
    pairs = itertools.product(scale.rows, scale.adapters)
    return list(dict.fromkeys(Point(rows, min(rows, adapters)) for rows, adapters in pairs))


def write_config(model: Model, num_layers: int, folder: Path) -> LlamaConfig:
    """A checkpoint folder without weights."""
    config = LlamaConfig(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_size,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    return config


def load_random_decoder(
    folder: Path, *, dtype: torch.dtype | None, device: torch.device, **options: Any
) -> tuple[Decoder, DecoderConfig]:
    """Stands in for `load_decoder`: random weights, of a scale that neither vanishes nor grows."""
    config = decoder_config(read_hf_config(folder))
    decoder = Decoder(config, dtype=dtype or torch.float32, device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.fill_(1.0 if "norm" in name else 0.0)
    return decoder.eval(), config


@contextmanager
def timed_runner(scale: Scale, stage: Stage, folder: Path) -> Iterator[tuple[ModelRunner, list[AdapterRef]]]:
    """A runner of the timed model whose graphs are captured, and its adapters, all in slots."""
    num_adapters = max(scale.adapters)
    write_config(scale.model, scale.num_layers, folder)
    adapter = write_adapter(folder, folder / "adapter", RANK if num_adapters > 2 else 4)
    most = max(scale.rows)
    config = EngineConfig(
        model=folder,
        dtype=scale.dtype,  # type: ignore[arg-type]
        device=stage.device.type,  # type: ignore[arg-type]
        max_model_len=2 * scale.context,
        max_num_seqs=most,
        max_num_batched_tokens=max(most, 16),
        kv_cache_tokens=most * (scale.context + 16),
    )
    lora = LoRAConfig(enable_lora=True, max_num_loras=num_adapters, max_lora_rank=RANK, adapt_embeddings=False)
    with patch.object(lora_core.engine.runner, "load_decoder", load_random_decoder):
        runner = ModelRunner(config, lora)
    refs = []
    for index in range(num_adapters):
        response = runner.manager.load_adapter(f"a{index}={adapter}")
        require(response.status is LoRAStatus.SUCCESS, f"a{index} was not loaded: {response.message}")
        refs.append(runner.manager.acquire(f"a{index}"))
        runner.manager.activate_adapter(refs[-1])
    runner.compile_kernels()
    runner.capture_graphs()
    yield runner, refs


def decode_batch(runner: ModelRunner, point: Point, refs: Sequence[AdapterRef], context: int) -> ScheduledBatch:
    """A step in which every sequence decodes behind `context` tokens; rows are spread over the adapters."""
    per_sequence = -(-(context + 1) // runner.kv_cache.layout.block_size)
    rows = []
    for index in range(point.rows):
        request = Request(
            request_id=str(index),
            token_ids=[(7 * index + place) % runner.config.vocab_size for place in range(context + 1)],
            num_prompt_tokens=context,
            arrival=index,
            adapter=refs[index % point.adapters] if point.adapters else None,
        )
        request.num_computed = context
        request.block_table += range(index * per_sequence, (index + 1) * per_sequence)
        rows.append(ScheduledRow(request, 1))
    return ScheduledBatch(runner.manager.sort_lora_batch(rows))


def step_bytes(runner: ModelRunner, point: Point, context: int) -> int:
    """What a decode step must read at least: weights but the embedding, keys and values, the adapters it uses."""
    config, itemsize = runner.config, runner.dtype.itemsize
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * query + 2 * kv + 3 * config.intermediate_size)
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    past = point.rows * context * config.num_layers * 2 * kv
    adapter = RANK * sum(len(site.slices) * site.in_features + site.out_features for site in runner.manager.sites)
    return itemsize * (weights + past + point.adapters * adapter)


def step_s(runner: ModelRunner, batch: ScheduledBatch, repeats: int) -> float:
    """Seconds of a step, launched again and again as an engine does that runs ahead."""

    def run() -> None:
        runner.run(batch).argmax(-1)

    def wait() -> None:
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)

    run()
    wait()
    spans = []
    for _ in range(3):
        began_s = time.perf_counter()
        for _ in range(repeats):
            run()
        wait()
        spans.append((time.perf_counter() - began_s) / repeats)
    return statistics.median(spans)


def time_decoding(stage: Stage, scale: Scale, folder: Path, clock: Clock, say: Say = say_json) -> None:
    """One line a point: tokens a second, share of the roofline, and base-only time over the time with adapters."""
    is_real = stage.device.type == "cuda"
    with timed_runner(scale, stage, folder) as (runner, refs):
        bandwidth = floors.copy_bytes_per_s(stage) if is_real else 1.0
        base_s: dict[int, float] = {}
        for point in points(scale):
            if is_real and not clock.has(8, f"decode {point.rows} x {point.adapters}"):
                continue
            batch = decode_batch(runner, point, refs, scale.context)
            before = runner.num_replays
            is_finite = bool(runner.run(batch).isfinite().all())
            about = f"rows={point.rows} adapters={point.adapters}"
            is_right = is_finite and runner.num_replays == before + 1
            say(check="engine decode", about=about, ok=is_right, error=None if is_right else "not finite, or no graph")
            found_s = step_s(runner, batch, scale.repeats)
            if not point.adapters:
                base_s[point.rows] = found_s
            if is_real and is_right:
                report_decoding(runner, scale, point, found_s, base_s.get(point.rows), bandwidth)


def report_decoding(
    runner: ModelRunner, scale: Scale, point: Point, found_s: float, base_s: float | None, bandwidth: float
) -> None:
    """Print a point's line."""
    share = step_bytes(runner, point, scale.context) / bandwidth / found_s
    over_base = base_s / found_s if point.adapters and base_s is not None else None
    met = share >= ROOFLINE_GOAL and (over_base is None or point != Point(64, 64) or over_base >= LORA_GOAL)
    report(
        "decode_step",
        compared=f"the bandwidth of a copy, {bandwidth / 1e9:.0f} GB/s, and the same step without adapters",
        goal=f"roofline_share >= {ROOFLINE_GOAL}, base_over_lora >= {LORA_GOAL} at 64 x 64",
        met=met,
        model=scale.model.name,
        rows=point.rows,
        adapters=point.adapters,
        rank=RANK,
        context=scale.context,
        step_ms=found_s * 1e3,
        tokens_per_s=point.rows / found_s,
        roofline_share=share,
        base_over_lora=over_base,
    )


def check_answers(stage: Stage, folder: Path, say: Say = say_json, num_tokens: int = 24) -> None:
    """Greedy answers of engines with graphs that run ahead, against those of one with neither, in fp32.

    On a GPU one of them has compiled layers.
    """
    tiny = Model("answers", 64, 4, 2, 16, 96, 128)
    torch.manual_seed(0)
    config = write_config(tiny, 2, folder)
    config.initializer_range = 0.2
    LlamaForCausalLM(config).save_pretrained(folder)
    adapters = {f"a{seed}": write_adapter(folder, folder / f"a{seed}", 4 + 2 * seed, seed=seed) for seed in range(2)}
    plain = answers(stage, folder, adapters, num_tokens, cuda_graphs="none", async_scheduling=False)
    for compile in (False, True) if stage.device.type == "cuda" else (False,):
        found = answers(stage, folder, adapters, num_tokens, cuda_graphs="all", async_scheduling=True, compile=compile)
        for request_id, expected in plain.items():
            is_equal = found[request_id] == expected
            error = None if is_equal else f"{found[request_id]}, expected {expected}"
            about = f"{request_id}, compiled" if compile else request_id
            say(check="engine answers", about=about, ok=is_equal, error=error)
    differ = len({tuple(tokens) for tokens in plain.values()}) > 2
    say(check="engine answers", about="they differ", ok=differ, error=None if differ else "answers are alike")


def check_flashinfer(stage: Stage, say: Say = say_json) -> None:
    """FlashInfer against the reference, where it is installed, for heads of an 8B model with and without a window."""
    if library_fault(stage.device) is not None:
        return
    layout = PagedLayout(32, 8, 128, 16, 64, torch.bfloat16)
    opened = open_flashinfer(layout, windows=(None, 24), scale=128**-0.5, softcap=None, device=stage.device)
    error = None if opened is not None else "the log says why it is left alone"
    say(check="flashinfer", about="8B heads", ok=opened is not None, error=error)


def answers(
    stage: Stage, folder: Path, adapters: dict[str, Path], num_tokens: int, **settings: Any
) -> dict[str, list[int]]:
    """What an engine answers to requests that come one after the other."""
    engine_config = EngineConfig(
        model=folder,
        dtype="float32",
        device=stage.device.type,  # type: ignore[arg-type]
        kv_cache_tokens=1024,
        max_model_len=128,
        max_num_seqs=3,
        max_num_batched_tokens=32,
        **settings,
    )
    paths = tuple(f"{name}={path}" for name, path in adapters.items())
    lora = LoRAConfig(enable_lora=True, max_num_loras=2, max_lora_rank=8, lora_paths=paths)
    engine = LLMEngine(engine_config, lora)
    engine.warm_up()
    tokens: dict[str, list[int]] = {}
    names: list[str | None] = [None, "a0", "a1", "a0"]
    for index, name in enumerate(names):
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        prompt = [(31 * index + 17 * place) % 128 for place in range(3 + index)]
        engine.add_request(GenerateRequest(f"{index} {name or 'base'}", prompt, sampling, name))
        take(engine, tokens)
    while engine.has_work():
        take(engine, tokens)
    engine.check_invariants()
    has_graphs = settings["cuda_graphs"] != "none"
    require(bool(engine.runner.num_replays) == has_graphs, f"{engine.runner.num_replays} steps were replayed")
    return tokens


def take(engine: LLMEngine, tokens: dict[str, list[int]]) -> None:
    """Step once, and gather what comes."""
    for delta in engine.step():
        require(delta.error is None, f"{delta.request_id} failed: {delta.error}")
        tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
