"""The adapters of one engine: loaded, given slots, written into the model's layers, and routed to."""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import TypeVar

import msgspec
import torch
from torch import Tensor, nn

from kernels import Routing
from lora_core.adapter_reader import AdapterReader
from lora_core.adapter_record import AdapterRecord
from lora_core.adapters import AdapterTable
from lora_core.base_modules import ModelBaseModules
from lora_core.config import LoRAConfig
from lora_core.errors import AdapterNotFound, LoRADisabled
from lora_core.inputs import LoRAInputs
from lora_core.layers import LoRAModelWrapper, RoutingContext
from lora_core.load_times import LoadTimes
from lora_core.loader import AdapterLoader, LoadRequest
from lora_core.messages import Residency
from lora_core.model import LoRAModel
from lora_core.operator_pins import PinRefused
from lora_core.parallel.slot_split import SlotSplit
from lora_core.readiness import Readiness
from lora_core.routing import RoutedRequest
from lora_core.stacks import SlotStacks, TensorSpec
from lora_core.staging import Staging
from lora_core.store import AdapterStore
from lora_core.targets import LoRASite, LoRATargetModule, lora_sites, stack_weights
from lora_core.types import AdapterRef, AdapterStatus, LoRAResponse, LoRAStatus
from lora_core.workload import SlotCounts
from lora_core.wrapping import wrap_targets

R = TypeVar("R", bound=RoutedRequest)

_LORA_IS_OFF = "this server runs with enable_lora: false; set it to true to serve adapters"


class LoRAManagerV3:
    """Loads adapters, gives them slots, and routes each row of a batch to the slot of its request's adapter.

    An adapter's identity is its generation (`AdapterRef`): a name that is unloaded, replaced or loaded again has a new
    one, and requests that acquired the old one keep its weights until they release it.

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
        self.config = config
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
        self._table: AdapterTable[LoRAModel] = AdapterTable(self.num_slots, config.host_memory_bytes)
        store = AdapterStore(config.allow_remote, max_bytes=config.download_limit_bytes, sources=config.sources)
        self._times = LoadTimes()
        self._loader = AdapterLoader(self._table, store, self._reader.read, config.host_memory_bytes, times=self._times)
        # On CPU the kernels take fp32 stacks whatever the base's data type.
        stack_dtype = torch.float32 if self.device.type == "cpu" else self.base_dtype
        stacks = SlotStacks(self._sites, self.num_slots, config.max_lora_rank, stack_dtype)
        if split is not None:
            split.open(self.num_slots, config.max_lora_rank, stack_dtype)
        self._inputs = LoRAInputs(stacks, self.max_groups, self.device, split)
        self.before_write: Callable[[], None] = lambda: None
        """Called by the thread that runs the model when an adapter has its slot, which another may have lost, before
        the slot changes."""
        self._staging = Staging(
            self._table,
            self._reader.read,
            self._inputs.begin_write,
            read_timeout_s=config.read_timeout_s,
            times=self._times,
            before_write=lambda: self.before_write(),
        )

    def load_adapter(
        self,
        spec: str,
        *,
        generation: int | None = None,
        replace: bool = False,
        content_hash: str | None = None,
    ) -> LoRAResponse:
        """Read, check and admit an adapter; it gets a slot when a request needs one.

        The same name with the same folder and content is a success that changes nothing, except that a `generation`
        which differs from the adapter's becomes its identity: new requests get it, those in progress end under the old
        one. Concurrent loads of one name that ask for the same find and read its files once.

        Args:
            spec: `name=path`, or `path` alone as both; a path is a local folder or, where the operator allows it, a
                Hugging Face repo id, with `@revision` if wanted.
            generation: Identity of this load; unset: a fresh one. Neither is ever given twice.
            replace: Take the place of the adapter that has the name, if there is one. It serves until the new one is
                read and checked, and goes on if that fails; its requests in progress finish with its weights within
                `drain_timeout_s`. A pin passes on.
            content_hash: Refuse files of another hash; unset accepts any.

        Returns:
            SUCCESS with a report, or why not: LOAD_NAME_EXISTS (other folder or content, and not `replace`),
            LOAD_INVALID_PATH, LOAD_INVALID_ADAPTER, or LOAD_ERROR for everything else. Never raises.
        """
        name, has_path, path = spec.partition("=")
        if not has_path:
            path = name
        if not self.config.enable_lora:
            return LoRAResponse(LoRAStatus.LOAD_ERROR, f"LoRA adapter {name!r} was not loaded: {_LORA_IS_OFF}")
        if not name or not path:
            return LoRAResponse(
                LoRAStatus.LOAD_INVALID_PATH,
                f"{spec!r} names no adapter; expected `name=path`, or `path` alone as both",
            )
        request = LoadRequest(source=path, generation=generation, replace=replace, content_hash=content_hash)
        return self._loader.load(name, request)

    def unload_adapter(self, name: str) -> LoRAResponse:
        """Admit no more requests for `name`, now; its slot and memory are freed when the last request releases it.

        The engine ends the requests that have not ended `drain_timeout_s` later. A pin ends with it.

        Returns:
            SUCCESS, UNLOAD_NAME_NONEXISTENT, or UNLOAD_ERROR with LoRA off. Never raises.
        """
        if not self.config.enable_lora:
            return LoRAResponse(LoRAStatus.UNLOAD_ERROR, f"LoRA adapter {name!r} was not unloaded: {_LORA_IS_OFF}")
        try:
            num_users = self._table.retire(name)
        except AdapterNotFound as error:
            return LoRAResponse(LoRAStatus.UNLOAD_NAME_NONEXISTENT, str(error))
        drain = f"may finish with it within {self.config.drain_timeout_s:g} s (lora_config.drain_timeout_s)"
        rest = f"; {num_users} request(s) in progress {drain}" if num_users else ""
        return LoRAResponse(LoRAStatus.SUCCESS, f"LoRA adapter {name!r} unloaded successfully{rest}")

    def pin_adapter(self, name: str) -> LoRAResponse:
        """Give an adapter the next slot that can be had, and keep it there until `unpin_adapter` or its unload.

        Returns:
            SUCCESS, also for an adapter that is pinned already; PIN_NAME_NONEXISTENT; or PIN_ERROR, with LoRA off or
            with no slot left for adapters that are not pinned. Never raises.
        """
        return self._change_pin(name, "pinned", self._table.wanted.pin)

    def unpin_adapter(self, name: str) -> LoRAResponse:
        """End a pin; the adapter keeps its slot until another needs it. Answers as `pin_adapter` does."""
        return self._change_pin(name, "unpinned", self._table.wanted.unpin)

    def _change_pin(self, name: str, done: str, change: Callable[[str], bool]) -> LoRAResponse:
        if not self.config.enable_lora:
            return LoRAResponse(LoRAStatus.PIN_ERROR, f"LoRA adapter {name!r} was not {done}: {_LORA_IS_OFF}")
        try:
            is_changed = change(name)
        except AdapterNotFound as error:
            return LoRAResponse(LoRAStatus.PIN_NAME_NONEXISTENT, str(error))
        except PinRefused as error:
            return LoRAResponse(LoRAStatus.PIN_ERROR, f"LoRA adapter {name!r} was not {done}: {error}")
        rest = "" if is_changed else "; it was so already, and nothing changed"
        return LoRAResponse(LoRAStatus.SUCCESS, f"LoRA adapter {name!r} {done} successfully{rest}")

    def warm_adapter(self, name: str) -> LoRAResponse:
        """Bring an adapter to host memory and, if one is to spare then, to a slot, before requests come for it.

        A slot is to spare that is free, or whose adapter has no requests, no pin and no protection, while no request
        waits for one. It is written in a tenth of the steps' time at most.

        Returns:
            SUCCESS where it is in a slot or on its way; UNAVAILABLE where no slot is to spare, and nothing comes of
            it; PIN_NAME_NONEXISTENT; or LOAD_ERROR with LoRA off. Never raises.
        """
        if not self.config.enable_lora:
            return LoRAResponse(LoRAStatus.LOAD_ERROR, f"LoRA adapter {name!r} was not warmed up: {_LORA_IS_OFF}")
        try:
            readiness = self._table.wanted.warm_up(name)
        except AdapterNotFound as error:
            return LoRAResponse(LoRAStatus.PIN_NAME_NONEXISTENT, str(error))
        if readiness is Readiness.NO_SLOT:
            return LoRAResponse(LoRAStatus.UNAVAILABLE, f"LoRA adapter {name!r} gets no slot now: none is to spare")
        where = "is in a slot" if readiness is Readiness.READY else "is on its way to a slot"
        return LoRAResponse(LoRAStatus.SUCCESS, f"LoRA adapter {name!r} {where}")

    def protect_adapters(self, names: Collection[str]) -> None:
        """From now on let these adapters lose their slots last, and no others; unknown names do not matter."""
        self._table.wanted.protect(names)

    def reset_adapter(self, name: str) -> None:
        """Have an adapter that runs no requests read from its folder, and its slot written, anew."""
        self._table.reset(name)

    def status(self, name: str) -> AdapterStatus:
        """How an adapter that admits requests is held. Raises AdapterNotFound."""
        return self._table.whereabouts.status(name)

    def statuses(self) -> list[AdapterStatus]:
        """How all adapters that admit requests are held, in load order."""
        return self._table.whereabouts.statuses()

    @property
    def loras(self) -> dict[str, AdapterRecord]:
        """What describes the adapters that admit requests, by name; a copy."""
        return self._table.whereabouts.records()

    def is_lora(self, name: str) -> bool:
        """Whether `name` admits requests."""
        return self._table.find(name) is not None

    def is_active_lora(self, name: str) -> bool:
        """Whether the adapter that requests for `name` would get has a slot."""
        found = self._table.find(name)
        return found is not None and self._table.slot_of(found[0]) is not None

    @property
    def sites(self) -> tuple[LoRASite, ...]:
        """Where adapters can change the model, or this rank's share of it; none with LoRA off."""
        return self._sites

    def residency(self) -> tuple[list[AdapterRef], list[AdapterRef]]:
        """Adapters that admit requests: those in slots, and all of them."""
        return self._table.whereabouts.residency()

    def in_host_memory(self) -> list[AdapterRef]:
        """Adapters that admit requests and need not be read for a slot."""
        return self._table.whereabouts.in_host_memory()

    def next_residency(self) -> Residency | None:
        """Where adapters are, as far as that has changed since the last call; None if it has not. One thread calls."""
        return self._table.whereabouts.next_report()

    def slot_counts(self) -> SlotCounts:
        """What came of adapters and slots since the start."""
        return msgspec.structs.replace(
            self._table.whereabouts.slot_counts(),
            num_loads=dict(self._times.num_loads),
            load_s=dict(self._times.load_s),
        )

    def load_ms_per_mib(self) -> dict[str, float]:
        """Measured: milliseconds to bring a MiB of adapter into a slot, by where it is; tiers not measured left out."""
        return self._times.ms_per_mib()

    def acquire(self, name: str) -> AdapterRef:
        """Admit a request for `name`: the adapter stays loaded until `release`.

        Raises:
            LoRADisabled: LoRA is off.
            AdapterNotFound: the name is not loaded, or no longer admits requests.
        """
        if not self.config.enable_lora:
            raise LoRADisabled(f"LoRA adapter {name!r} cannot be used: {_LORA_IS_OFF}")
        return self._table.acquire(name)

    def release(self, ref: AdapterRef) -> None:
        """End one `acquire`. Raises KeyError if there is none."""
        self._table.release(ref)

    def num_users(self, ref: AdapterRef) -> int:
        """Calls of `acquire` that `release` has not ended."""
        return self._table.num_users(ref)

    def pin(self, ref: AdapterRef) -> None:
        """Keep the adapter in its slot until `unpin`; pins are counted. Raises KeyError if it has no slot."""
        self._table.pin(ref)

    def unpin(self, ref: AdapterRef) -> None:
        """End one `pin`. Raises KeyError if there is none."""
        self._table.unpin(ref)

    def num_pins(self, ref: AdapterRef) -> int:
        """Calls of `pin` that `unpin` has not ended."""
        return self._table.num_pins(ref)

    def is_pinned(self, ref: AdapterRef) -> bool:
        """Whether `pin_adapter` holds for it."""
        return self._table.wanted.is_pinned(ref)

    def pinned_without_slot(self) -> list[AdapterRef]:
        """Adapters for which `pin_adapter` holds, and that are still on their way to a slot."""
        return self._table.wanted.pinned_without_slot()

    def retired(self) -> list[AdapterRef]:
        """Generations that were unloaded or replaced, and have users yet."""
        return self._table.retired()

    def take_dropped(self) -> list[AdapterRef]:
        """Generations, without users, that an unload or a replacement has ended since the last call, for good."""
        return self._table.take_dropped()

    def slot_of(self, ref: AdapterRef) -> int | None:
        """The adapter's slot, or None while it has none that is written."""
        return self._table.slot_of(ref)

    def can_activate(self, ref: AdapterRef) -> bool:
        """Whether a slot could be had now: the adapter's own, a free one, or one that is not in use."""
        return self._table.can_activate(ref)

    def wants_slot(self, ref: AdapterRef) -> bool:
        """Whether a slot is all that the adapter lacks: its tensors are in memory."""
        return self._table.wants_slot(ref)

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
        slots = self._table.use_slots(request.adapter for request in batch)
        keys = [-1 if slot is None else slot for slot in slots]
        # Reversed, Python's sort still keeps equal keys in the order they came.
        return [batch[index] for index in sorted(range(len(batch)), key=keys.__getitem__, reverse=True)]

    def active_adapters_by_slot(self, batch: Sequence[RoutedRequest]) -> dict[int, AdapterRef]:
        """The adapters of a batch that have slots, by slot."""
        by_slot: dict[int, AdapterRef] = {}
        for request in batch:
            if request.adapter is not None and (slot := self._table.slot_of(request.adapter)) is not None:
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
        return self._table.use_slots(request.adapter for request in batch)

    def slot_ranks(self) -> list[int]:
        """True rank of each slot's adapter; 0 for an empty slot."""
        ranks = [0] * self.num_slots
        for slot, (_, record) in self._table.whereabouts.residents().items():
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
