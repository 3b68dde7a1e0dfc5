"""The adapters of one engine: loaded, given slots, written into the model's layers, and routed to."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import TypeVar

import torch
from torch import Tensor, nn

from kernels import Routing
from lora_core.adapter_catalogue import AdapterCatalogue
from lora_core.adapter_reader import AdapterReader
from lora_core.adapters import AdapterTable
from lora_core.base_modules import ModelBaseModules
from lora_core.config import LoRAConfig
from lora_core.inputs import LoRAInputs
from lora_core.layers import LoRAModelWrapper, RoutingContext
from lora_core.load_times import LoadTimes
from lora_core.loader import AdapterLoader
from lora_core.model import LoRAModel
from lora_core.parallel.slot_split import SlotSplit
from lora_core.readiness import Readiness
from lora_core.routing import RoutedRequest
from lora_core.stacks import SlotStacks, TensorSpec, stack_dtype
from lora_core.staging import Staging
from lora_core.store import AdapterStore
from lora_core.targets import LoRASite, LoRATargetModule, lora_sites, stack_weights
from lora_core.types import AdapterRef
from lora_core.wrapping import wrap_targets

R = TypeVar("R", bound=RoutedRequest)


class LoRAManagerV3(AdapterCatalogue):
    """Loads adapters, gives them slots, and routes each row of a batch to the slot of its request's adapter.

    A loaded adapter's tensors are in a slot, in host memory (at most `config.host_memory_bytes` for all of them), or in
    its folder, from where they are read again when a request needs them.

    Threads: any thread may load, unload, pin, acquire, release and ask. What touches the model's tensors (`prepare`,
    `advance`, `activate_adapter`, `bind_inputs`, `get_lora_graph_inputs`, `wrap`) belongs to the thread that runs the
    model.
    """

    def __init__(
        self,
        config: LoRAConfig,
        base_model_path: str,
        base_dtype: torch.dtype,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        max_lora_seq_len: int,
        targets: Sequence[LoRATargetModule] = (),
        *,
        projections: Mapping[str, tuple[int, int]],
        num_layers: int,
        device: torch.device | str = "cpu",
        max_groups: int | None = None,
        split: SlotSplit | None = None,
    ) -> None:
        """Set up empty slots; `config.lora_paths` are left to the caller, who decides what a failure means.

        Args:
            config: Whether adapters are served, how many at once, and how large.
            base_model_path: Folder of the base model.
            base_dtype: Data type of the base model's weights; adapters are cast to it (float8 bases: to bfloat16).
            n_heads: Query heads.
            n_kv_heads: Key and value heads.
            head_dim: Width of one head.
            max_lora_seq_len: Most token rows in one step.
            targets: The linear layers adapters may change, from the model's architecture.
            projections: `(out_features, in_features)` of the base model's projections, by PEFT name.
            num_layers: Decoder layers of the base model.
            device: Where the model is, and its slot tensors.
            max_groups: Most runs of equal slot in one batch; unset: the number of slots, enough for sorted batches.
            split: How slots are divided among the ranks of a model on several devices; heads and projections given are
                then those of the whole model, and the model that is wrapped has a share of them.

        Raises:
            ConfigError: the targets disagree with the projections.
        """
        self.base_model_path = base_model_path
        self.base_dtype = torch.bfloat16 if base_dtype.is_floating_point and base_dtype.itemsize == 1 else base_dtype
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.head_dim = head_dim
        self.max_lora_seq_len = max_lora_seq_len
        self.targets = tuple(targets)
        self.device = torch.device(device)
        self.num_slots = config.max_num_loras if config.enable_lora else 0
        self.max_groups = self.num_slots if max_groups is None else max_groups
        sites = lora_sites(self.targets, projections, num_layers) if config.enable_lora else ()
        self._split = split
        self._sites = sites if split is None else split.sites
        self._reader = AdapterReader(
            base_dtype=self.base_dtype,
            max_lora_rank=config.max_lora_rank,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            sites=sites,
            num_layers=num_layers,
            pin_memory=self.device.type == "cuda",
        )
        table: AdapterTable[LoRAModel] = AdapterTable(self.num_slots, config.host_memory_bytes)
        store = AdapterStore(config.allow_remote, max_bytes=config.download_limit_bytes, sources=config.sources)
        times = LoadTimes()
        loader = AdapterLoader(table, store, self._reader.read, config.host_memory_bytes, times=times)
        super().__init__(config, table, loader, times)
        self._slots = table
        dtype = stack_dtype(self.base_dtype, self.device)
        stacks = SlotStacks(self._sites, self.num_slots, config.max_lora_rank, dtype)
        if split is not None:
            split.open(self.num_slots, config.max_lora_rank, dtype)
        self._inputs = LoRAInputs(stacks, self.max_groups, self.device, split)
        self.before_write: Callable[[], None] = lambda: None
        """Called by the thread that runs the model when an adapter has its slot, which another may have lost, before
        the slot changes."""
        self._staging = Staging(
            table,
            self._reader.read,
            self._inputs.begin_write,
            read_timeout_s=config.read_timeout_s,
            times=times,
            before_write=lambda: self.before_write(),
        )

    @property
    def sites(self) -> tuple[LoRASite, ...]:
        """Where adapters can change the model, or this rank's share of it; none with LoRA off."""
        return self._sites

    def prepare(self, ref: AdapterRef, *, take_slot: bool = True) -> Readiness:
        """Bring an adapter nearer to a slot for a request that waits for it, without waiting for anything.

        Tensors that are not in memory are read by other threads, a few adapters ahead, in the order of asking. An
        adapter whose tensors are in memory gets a slot, if `take_slot` and one can be had, and as much of it is written
        as the step's time allows (see `advance`). The slot is kept for it until a request pins it, or no user is left.

        Raises:
            KeyError: the generation is not loaded.
            AdapterLost: its files were needed, and are gone or changed. Told once; the next call tries anew.
        """
        return self._staging.prepare(ref, take_slot=take_slot)

    def advance(self, budget_s: float | None) -> None:
        """Begin a step: write slots on, and bring adapters that are pinned or to be warmed up nearer to theirs.

        Args:
            budget_s: Seconds the step may spend on writing slots, `prepare` included; None: as long as it takes.
        """
        self._staging.advance(budget_s)

    @property
    def is_writing(self) -> bool:
        """Whether a slot is being written."""
        return self._staging.is_writing

    @property
    def is_busy(self) -> bool:
        """Whether `advance` has something to do: a slot to write, or an adapter to bring nearer to one."""
        return self._staging.is_busy

    @property
    def num_file_reads(self) -> int:
        """How often an adapter's files were read, the first time and again."""
        return self._reader.num_reads

    @property
    def num_slot_writes(self) -> int:
        """Slots written since the start, one for each assignment."""
        return self._staging.num_slot_writes

    def wait(self, timeout_s: float) -> None:
        """Return when files that are read for a request have been read, or after the timeout; holds no lock."""
        self._staging.wait(timeout_s)

    def activate_adapter(self, name_or_ref: str | AdapterRef) -> int:
        """Give an adapter a slot and write its weights there, or refresh the recency of the slot it has.

        The least recently used adapter that is not in use makes room. What it takes to read and write is done at once.

        Returns:
            The slot.

        Raises:
            KeyError: no such adapter is loaded.
            NoFreeSlot: all slots are in use or pinned.
            AdapterLost: its tensors were not in memory, and its files are gone or changed.
        """
        return self._staging.activate(name_or_ref)

    def sort_lora_batch(self, batch: Sequence[R]) -> list[R]:
        """Order a batch for routing: highest slot first, base requests last, otherwise as they came.

        Raises:
            KeyError: the adapter of a request has no slot.
        """
        if not self.config.enable_lora:
            return list(batch)
        slots = self._slots.use_slots(request.adapter for request in batch)
        keys = [-1 if slot is None else slot for slot in slots]
        # Reversed, Python's sort still keeps equal keys in the order they came.
        return [batch[index] for index in sorted(range(len(batch)), key=keys.__getitem__, reverse=True)]

    def active_adapters_by_slot(self, batch: Sequence[RoutedRequest]) -> dict[int, AdapterRef]:
        """The adapters of a batch that have slots, by slot."""
        by_slot: dict[int, AdapterRef] = {}
        for request in batch:
            if request.adapter is not None and (slot := self._slots.slot_of(request.adapter)) is not None:
                by_slot[slot] = request.adapter
        return by_slot

    def get_lora_graph_inputs(
        self, batch: Sequence[RoutedRequest], row_offsets: Sequence[int], device: torch.device | str
    ) -> Routing:
        """Route a sorted batch, and refresh the recency of its adapters.

        Where there are bound routing tensors (see `symbolic_inputs`), they hold the triple, until the next call.

        Args:
            batch: Requests in row order, base requests last.
            row_offsets: First token row of each request and, last, the number of rows: `len(batch) + 1` of them.
            device: Where the step runs.

        Raises:
            KeyError: the adapter of a request has no slot; it is named.
            ValueError: the offsets do not fit the batch, the batch is not sorted, or it has too many rows.
        """
        if len(row_offsets) != len(batch) + 1 or row_offsets[0] != 0:
            raise ValueError(
                f"row_offsets has {len(row_offsets)} entries for {len(batch)} requests; "
                f"expected {len(batch) + 1}, the first of them 0"
            )
        return self.route(self.use_slots(batch), row_offsets, self.slot_ranks(), device)

    def use_slots(self, batch: Sequence[RoutedRequest]) -> list[int | None]:
        """Slot of each request's adapter, None for the base model, refreshing their recency.

        Raises:
            KeyError: the adapter of a request has no slot; it is named.
        """
        return self._slots.use_slots(request.adapter for request in batch)

    def slot_ranks(self) -> list[int]:
        """True rank of each slot's adapter; 0 for an empty slot."""
        ranks = [0] * self.num_slots
        for slot, (_, record) in self._slots.whereabouts.residents().items():
            ranks[slot] = record.rank
        return ranks

    def route(
        self,
        slots: Sequence[int | None],
        row_offsets: Sequence[int],
        slot_ranks: Sequence[int],
        device: torch.device | str,
        *,
        num_rows: int | None = None,
        into: Tensor | None = None,
    ) -> Routing:
        """Route a batch by the slots of its requests, whoever has found them; see `get_lora_graph_inputs`.

        Args:
            slots: What `use_slots` gives for the batch.
            row_offsets: First row of each request and, last, the number of rows.
            slot_ranks: What `slot_ranks` gives.
            device: Where the step runs.
            num_rows: Rows of the step, those included that pad it; unset: those of the requests.
            into: The buffer of an earlier routing of as many rows, which is overwritten; see `build_routing`.

        Raises:
            ValueError: the batch is not sorted, or it has too many rows.
        """
        if row_offsets[-1] > self.max_lora_seq_len:
            raise ValueError(f"the batch has {row_offsets[-1]} token rows, max_lora_seq_len is {self.max_lora_seq_len}")
        return self._inputs.route(
            slots,
            row_offsets,
            slot_ranks,
            torch.device(device),
            one_launch=self.config.one_launch,
            num_rows=num_rows,
            into=into,
        )

    def full_routing(self, num_rows: int, device: torch.device | str) -> Routing:
        """A routing of which every row uses a slot, with a buffer of its own: what graphs are captured with."""
        return self._inputs.full_routing(
            num_rows, self.config.max_lora_rank, torch.device(device), one_launch=self.config.one_launch
        )

    def mark_slot(self, slot: int, sites: Set[int], gain_sites: Set[int]) -> None:
        """Take note that another rank has written this one's slot tensors; see `SlotStacks.mark`."""
        self._inputs.mark(slot, sites, gain_sites)

    def wrap(self, model: nn.Module) -> LoRAModelWrapper:
        """Replace the targets of every decoder layer by LoRA layers, in place; parameter names stay as they are.

        Raises:
            ValueError: the model does not have the declared layers, a target matches nothing, or is wrapped already.
        """
        context = RoutingContext()
        wrap_targets(model, self._sites, context)
        self._inputs.bind_model(model)
        self._reader.base = ModelBaseModules(model) if self._split is None else self._split.base
        return LoRAModelWrapper(model, context)

    def lora_weight_adapter(
        self,
        base_adapter: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
        wrapper_prefix: str = "model",
    ) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
        """Turn the conversion of a base checkpoint into one for the wrapped model.

        Args:
            base_adapter: Renames a checkpoint's tensors as the model names its own, projections still apart.
            wrapper_prefix: Attribute of the wrapper that holds the model, put before every name; empty for the names
                of the model itself.

        Returns:
            A function from a checkpoint's tensors to the wrapped model's state, stacked targets concatenated.
        """

        def convert(checkpoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
            stacked = stack_weights(base_adapter(checkpoint), self.targets)
            return {f"{wrapper_prefix}.{name}" if wrapper_prefix else name: t for name, t in stacked.items()}

        return convert

    def symbolic_inputs(self) -> list[TensorSpec]:
        """What the wrapped model takes: 3 routing tensors, then one stack per `lora_parameters` entry."""
        return list(self._inputs.specs)

    def input_buffers(self) -> list[Tensor]:
        """The bound tensors or, before there are any, new ones of zeros, in the order of `symbolic_inputs`."""
        return self._inputs.buffers()

    def bind_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Make these the model's routing tensors and stacks, and write the adapters that have slots into them.

        Raises:
            ValueError: their number, or the shape, data type or device of one, is not that of `symbolic_inputs`.
            AdapterLost: an adapter in a slot is not in memory, and its files are gone or changed.
        """
        self._staging.rewrite(lambda residents: self._inputs.bind(tensors, residents))

    def check(self) -> None:
        """Assert what must hold between any two calls: of users, pins, slots, writes in progress and host memory.

        Called by the thread that runs the model.
        """
        self._staging.check()
