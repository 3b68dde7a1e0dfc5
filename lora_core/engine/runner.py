"""The model of an engine and the memory it decodes in: a scheduled batch in, logits out."""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import Routing
from kernels.flashinfer_attention import FlashInferAttention, open_flashinfer
from kernels.sgmv_native import sgmv_function
from lora_core.config import EngineConfig, LoRAConfig
from lora_core.engine.attention import (
    AttentionMetadata,
    SequenceSpan,
    build_attention,
    paged_layout,
    token_positions,
)
from lora_core.engine.decode_graphs import DecodeGraphs, GraphSizes
from lora_core.engine.decode_tables import DecodeTables, FlashInferTables, TritonTables
from lora_core.engine.engine_plan import DTYPES, graph_sizes, plan_engine, served_config
from lora_core.engine.flight import Flight
from lora_core.engine.kernel_variants import Progress, compile_all, engine_launches
from lora_core.engine.kv_cache import Ints, KVCache, KVLayout
from lora_core.engine.memory_sizes import memory_faults
from lora_core.engine.recorder import recorder_for
from lora_core.engine.request import ScheduledBatch
from lora_core.engine.step_buffers import PendingTokens, StepBuffers, fill_pending, to_device
from lora_core.engine.step_input import StepInput, make_step_input
from lora_core.engine.warm_up import WARM_UP_TOKENS, ignore_progress
from lora_core.errors import ConfigError
from lora_core.layers import LoRALayer, LoRAModelWrapper, lora_layers
from lora_core.manager import LoRAManagerV3
from lora_core.models.decoder import DecoderConfig
from lora_core.models.split import whole_of
from lora_core.models.weights import load_decoder
from lora_core.parallel.group import RankGroup
from lora_core.parallel.leader import Leader
from lora_core.parallel.shard import WHOLE

if TYPE_CHECKING:
    from kernels.launch import Launch

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns the decoder, the adapter manager bound to it, and the KV cache. Used by one thread.

    With `tensor_parallel_size` above 1 it has one share of each, and leads the processes that have the others.

    Attributes:
        config: What the decoder computes, or this rank's share of it; its `max_model_len` is the engine's, where that
            is shorter.
        manager: Its slot tensors are those the model reads. With LoRA off it is there, and refuses adapters.
        num_blocks: KV blocks; all may be given to requests.
        kv_cache: What they hold. On devices with Triton kernels it has one block more, where rows that pad steps write.
        plan: What all of it takes of the device's memory.
    """

    def __init__(self, engine_config: EngineConfig, lora_config: LoRAConfig, *, group: RankGroup | None = None) -> None:
        """Load the model and allocate the KV cache.

        Args:
            engine_config: The model, its device and its budgets.
            lora_config: Whether adapters are served, how many at once, and how large.
            group: Given to a rank that follows another one's steps; it calls `execute` only, and not `run`.

        Raises:
            UnsupportedModel: the model's architecture or configuration is not served.
            ConfigError: a setting cannot work with this model or machine.
            EngineDead: another rank could not be started.
        """
        self.device = rank_device(engine_config.device, 0 if group is None else group.shard.rank)
        self._is_compiled = False
        self._leader: Leader | None = None
        if group is None and engine_config.tensor_parallel_size > 1:
            self._leader = Leader(engine_config, lora_config, self.device)
            group = self._leader.group
        self._engine_config, self._lora_config = engine_config, lora_config
        try:
            self._start(engine_config, lora_config, group)
        except BaseException:
            self.close()
            raise

    def _start(self, engine_config: EngineConfig, lora_config: LoRAConfig, group: RankGroup | None) -> None:
        """Plan the memory, and take it; on all ranks."""
        self.plan = plan_engine(engine_config, lora_config, self.device, WHOLE if group is None else group.shard)
        if group is not None:
            # A block has the same number on all ranks.
            least = group.least if self._leader is None else self._leader.least
            self.plan = replace(self.plan, kv_cache_tokens=least(self.plan.kv_cache_tokens))
        for line in self.plan.lines():
            logger.info("%s", line)
        with memory_faults(self.plan):
            self._load(engine_config, lora_config, group)
        if self._leader is not None:
            self._leader.wait_ready(self.num_blocks)

    def _load(self, engine_config: EngineConfig, lora_config: LoRAConfig, group: RankGroup | None) -> None:
        """Take the memory that was planned."""
        pack = engine_config.pack_weights and self.device.type == "cpu"
        self._decoder, config = load_decoder(
            engine_config.model,
            dtype=DTYPES[engine_config.dtype],
            device=self.device,
            pack=pack,
            quantization=engine_config.quantization,
            group=group,
        )
        self.dtype = self._decoder.dtype
        self.config = served_config(config, engine_config, lora_config)
        self.manager = _manager(self.config, engine_config, lora_config, self.dtype, self.device, self._leader)
        # Without adapters the model runs as it is; with them, the wrapper puts the routing in force.
        self._wrapper: LoRAModelWrapper | None = None
        self._head: LoRALayer | None = None
        if lora_config.enable_lora:
            if self.device.type == "cpu":
                # Compiled where it is not in the cache: no request waits for that.
                sgmv_function()
            self._wrapper = self.manager.wrap(self._decoder)
            self.manager.bind_inputs(self.manager.input_buffers())
            self._head = next((layer for _, layer in lora_layers(self._decoder) if layer.site.kind == "head"), None)
        self.num_blocks = self.plan.kv_cache_tokens // engine_config.block_size
        self._layout = KVLayout(
            num_blocks=self.num_blocks,
            num_kv_heads=config.num_kv_heads,
            block_size=engine_config.block_size,
            head_dim=config.head_dim,
        )
        spared = replace(self._layout, num_blocks=self.num_blocks + 1)
        self._paged = paged_layout(spared, config.num_heads, dtype=self.dtype, device=self.device)
        self._flashinfer: FlashInferAttention | None = None
        if self._paged is not None:
            self._layout = spared
            if engine_config.attention_backend == "flashinfer":
                self._flashinfer = open_flashinfer(
                    self._paged,
                    windows=config.windows,
                    scale=config.attention_scale,
                    softcap=config.score_softcap,
                    device=self.device,
                )
        self._graphs: DecodeGraphs | None = None
        self.kv_cache = KVCache(self._layout, config.num_layers, dtype=self.dtype, device=self.device)

    @property
    def can_run_ahead(self) -> bool:
        """Whether a step may begin from tokens that only the device has: all ranks would need them."""
        return self._leader is None

    @property
    def warm_up_tokens(self) -> tuple[int, ...]:
        """Lengths of the prompts that warm it up: on a GPU the longest step, too, which takes the most memory."""
        longest = self._engine_config.max_num_batched_tokens
        return (WARM_UP_TOKENS, longest) if self.device.type == "cuda" else (WARM_UP_TOKENS,)

    def kernel_launches(self) -> "list[Launch]":
        """One launch of each variant of the Triton kernels that steps can ask for; none where there are none."""
        if self._paged is None:
            return []
        sizes = self._graph_sizes()
        return engine_launches(
            self.config,
            self._paged,
            sites=self.manager.sites,
            lora=self._lora_config,
            max_groups=self.manager.max_groups,
            max_rows=self._engine_config.max_num_batched_tokens,
            max_seqs=self._engine_config.max_num_seqs,
            max_blocks=sizes.blocks[-1],
            graph_tables=list(sizes.tables) if sizes.adapted else [],
            device=self.device,
            attends=self._flashinfer is None,
        )

    def compile_kernels(self, progress: Progress = ignore_progress) -> None:
        """Compile every kernel that a step can ask for, on this rank and then on the others.

        Raises:
            ConfigError: the setting `compile` needs what this machine lacks.
        """
        if self._engine_config.compile:
            progress("compiling layers", 0, 1)
            self._compile_layers()
            progress("compiling layers", 1, 1)
        if self.device.type == "cuda" and self._paged is not None:
            compile_all(self.kernel_launches(), progress)
        self.call_ranks("compile_kernels")

    def _compile_layers(self) -> None:
        """Let steps run compiled code where it serves them, and compile no more."""
        # Importing it takes seconds.
        from torch._dynamo.exc import BackendCompilerFailed

        try:
            self._decoder.compile_between()
        except BackendCompilerFailed as error:
            why = (str(error.inner_exception).splitlines() or [""])[0]
            raise ConfigError(
                f"engine.compile is true, and torch.compile failed ({type(error.inner_exception).__name__}: {why}); on "
                "a CPU it needs a C++ compiler; set engine.compile to false"
            ) from error
        self._is_compiled = True

    def capture_graphs(self, progress: Progress = ignore_progress) -> None:
        """Capture the graphs of steps in which every sequence decodes; `execute` replays them from here on."""
        sizes = self._graph_sizes()
        recorder = recorder_for(self.device)
        if self._paged is None or recorder is None or not sizes.adapted:
            return
        with memory_faults(self.plan):
            tables: DecodeTables = TritonTables(self._paged, self.device)
            if self._flashinfer is not None:
                # Its tables are the same whatever the longest sequence.
                sizes = sizes._replace(blocks=sizes.blocks[-1:])
                largest = {"max_rows": sizes.rows[-1], "max_blocks": sizes.blocks[-1]}
                tables = FlashInferTables(self._flashinfer, self._layout, **largest)
            graphs = DecodeGraphs(
                self._forward,
                sizes,
                self._layout,
                tables,
                recorder,
                hidden_size=self.config.hidden_size,
                dtype=self.dtype,
                device=self.device,
                manager=self.manager,
                wrapper=self._wrapper,
            )
            graphs.capture(progress)
        self._graphs = graphs

    @property
    def num_replays(self) -> int:
        """Steps that were replayed from graphs."""
        return 0 if self._graphs is None else self._graphs.num_replays

    def run(self, batch: ScheduledBatch, flight: Flight | None = None) -> Tensor:
        """Compute a batch's tokens: store their keys and values, and choose nothing.

        Args:
            batch: At least one row, sorted by `manager.sort_lora_batch`; each request's adapter is in a slot and its
                `block_table` has room for `num_computed + num_tokens` tokens. Requests are not changed.
            flight: The step that chooses the tokens which requests of this one lack; needs `can_run_ahead`.

        Returns:
            fp32 logits `[rows that sample, vocab_size]`, in row order; all of `logit_rows` where prompts are scored.

        Raises:
            KeyError: the adapter of a request has no slot; it is named.
            ValueError: the batch is not sorted by slot.
            EngineDead: another rank is gone, or takes no part.
        """
        if self._wrapper is None:
            step = make_step_input(batch.rows)
        else:
            step = make_step_input(batch.rows, self.manager.use_slots(batch.rows), self.manager.slot_ranks())
        if self._leader is None:
            return self.execute(step, None if flight is None else flight.pending(step, batch))
        with self._leader.step(step):
            return self.execute(step)

    @torch.inference_mode()
    def execute(self, step: StepInput, pending: PendingTokens | None = None) -> Tensor:
        """Compute a step, or this rank's share of it.

        Args:
            step: The step.
            pending: Those of its tokens that only the device knows.

        Returns:
            fp32 logits `[len(step.logit_rows), vocab_size]`, see `run`; of ranks other than the first, no rows.
        """
        replayed = None if self._graphs is None else self._graphs.run(step, pending)
        hidden, routing = self._compute(step, pending) if replayed is None else replayed
        if len(step.logit_rows) < len(hidden):
            hidden = hidden.index_select(0, to_device(step.logit_rows, self.device))
        with self._routed(self._head_routing(routing, step.logit_rows)):
            return self._decoder.logits(hidden)

    def _compute(self, step: StepInput, pending: PendingTokens | None) -> tuple[Tensor, Routing | None]:
        """Hidden states of a step `[T, hidden_size]`, and its routing."""
        attention = build_attention(
            [SequenceSpan(*span) for span in zip(step.q_lens, step.kv_lens, step.block_tables, strict=True)],
            self._layout,
            windows=self.config.windows,
            dtype=self.dtype,
            device=self.device,
            paged=self._paged,
            flashinfer=self._flashinfer,
        )
        if attention.fresh_blocks is not None:
            self.kv_cache.clear(attention.fresh_blocks)
        token_ids = to_device(step.token_ids, self.device)
        if pending is not None:
            fill_pending(token_ids, pending)
        positions = to_device(token_positions(step.q_lens, step.kv_lens), self.device)
        routing = self._routing(step)
        with self._routed(routing):
            buffers = StepBuffers(token_ids, positions, attention.write_rows, token_ids)
            return self._forward(buffers, attention), routing

    def _forward(self, buffers: StepBuffers, attention: AttentionMetadata) -> Tensor:
        # What was not compiled at start runs as it is: no request pays for a compilation.
        with torch.compiler.set_stance("eager_on_recompile") if self._is_compiled else nullcontext():
            hidden: Tensor = self._decoder(buffers.token_ids, buffers.positions, attention, self.kv_cache.layers)
        return hidden

    def check_ranks(self) -> None:
        """Raise EngineDead if another rank's process has ended."""
        if self._leader is not None:
            self._leader.check()

    def call_ranks(self, method: str) -> None:
        """Call a method of the other ranks' runners. Raises EngineDead: it failed, or a rank is gone."""
        if self._leader is not None:
            self._leader.call(method)

    def close(self) -> None:
        """End the other ranks; may be called again. Without a call they end with this process, or with this object."""
        if self._leader is not None:
            self._leader.close()

    def _routing(self, step: StepInput) -> Routing | None:
        if self._wrapper is None:
            return None
        return self.manager.route(step.slots, step.row_offsets, step.slot_ranks, self.device)

    def _head_routing(self, routing: Routing | None, sampling_rows: Ints) -> Routing | None:
        """The routing of the rows that sample; None where no adapter of the step changes the head."""
        if routing is None or self._head is None or not self._head.is_live(routing):
            return None
        if len(sampling_rows) == routing.num_rows:
            return routing
        return routing.select(sampling_rows.tolist())

    def _routed(self, routing: Routing | None) -> AbstractContextManager[None]:
        return nullcontext() if self._wrapper is None else self._wrapper.routed(routing)

    def _graph_sizes(self) -> GraphSizes:
        return graph_sizes(self._engine_config, self._lora_config, self.config, self.plan.kv_cache_tokens)


def rank_device(setting: str, rank: int) -> torch.device:
    """The device of a rank, by the setting `device`. Raises ConfigError: there is none such."""
    if setting == "auto":
        setting = "cuda" if torch.cuda.is_available() else "cpu"
    if setting == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', and torch finds no CUDA device here; set it to 'cpu' or 'auto'")
    return torch.device(setting, rank) if setting == "cuda" and rank else torch.device(setting)


def _manager(
    config: DecoderConfig,
    engine_config: EngineConfig,
    lora_config: LoRAConfig,
    dtype: torch.dtype,
    device: torch.device,
    leader: Leader | None,
) -> LoRAManagerV3:
    split = None
    if leader is not None and lora_config.enable_lora:
        split = leader.split_slots(config, dtype)
    # Adapters are those of the whole model; other ranks are told what becomes of them.
    whole = config if leader is None else whole_of(config)
    return LoRAManagerV3(
        lora_config,
        str(engine_config.model),
        dtype,
        whole.num_heads,
        whole.num_kv_heads,
        whole.head_dim,
        engine_config.max_num_batched_tokens,
        whole.targets,
        projections=whole.projections,
        num_layers=whole.num_layers,
        device=device,
        split=split,
    )
