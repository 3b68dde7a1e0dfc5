"""The adapters of one engine: loaded, given slots, written into the model's layers, and routed to."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from kernels import Routing, build_routing
from lora_core.adapters import AdapterTable
from lora_core.config import LoRAConfig
from lora_core.errors import AdapterNotFound, InvalidAdapter, LoRADisabled
from lora_core.inputs import LoRAInputs
from lora_core.layers import LoRAModelWrapper, RoutingContext, wrap_targets
from lora_core.loader import AdapterLoader
from lora_core.model import LoRAModel
from lora_core.routing import RoutedRequest, routing_triple
from lora_core.stacks import SlotStacks, TensorSpec
from lora_core.store import AdapterStore
from lora_core.targets import LoRATargetModule, lora_sites, stack_weights
from lora_core.types import AdapterRef, LoRAResponse, LoRAStatus

R = TypeVar("R", bound=RoutedRequest)

_LORA_IS_OFF = "this server runs with enable_lora: false; set it to true to serve adapters"


class LoRAManagerV3:
    """Loads adapters, gives them slots, and routes each row of a batch to the slot of its request's adapter.

    An adapter's identity is its generation (`AdapterRef`): a name that is unloaded and loaded again has a new one, and
    requests that acquired the old one keep its weights until they release it.

    Threads: any thread may load, unload, acquire, release and ask. What touches the model's tensors
    (`activate_adapter`, `bind_inputs`, `get_lora_graph_inputs`, `wrap`) belongs to the thread that runs the model.
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
        self._num_layers = num_layers
        self._sites = lora_sites(self.targets, projections, num_layers) if config.enable_lora else ()
        self._projections = {p: projections[p] for site in self._sites for p in site.target.projections}
        self._table: AdapterTable[LoRAModel] = AdapterTable(self.num_slots)
        self._loader = AdapterLoader(self._table, AdapterStore(config.allow_remote), self._read_adapter)
        # On CPU the kernels take fp32 stacks whatever the base's data type.
        stack_dtype = torch.float32 if self.device.type == "cpu" else self.base_dtype
        stacks = SlotStacks(self._sites, self.num_slots, config.max_lora_rank, stack_dtype)
        self._inputs = LoRAInputs(stacks, self.max_groups, self.device)

    def load_adapter(self, spec: str, *, generation: int | None = None) -> LoRAResponse:
        """Read, check and admit an adapter; it gets a slot when it is activated.

        The same name with the same folder and content is a success that changes nothing. Concurrent loads of one name
        read its files once.

        Args:
            spec: `name=path`, or `path` alone as both; a path is a local folder or, where the operator allows it, a
                Hugging Face repo id, with `@revision` if wanted.
            generation: Identity of this load; unset: a fresh one. Neither is ever given twice.

        Returns:
            SUCCESS, or why not: LOAD_NAME_EXISTS (other folder or content), LOAD_INVALID_PATH, LOAD_INVALID_ADAPTER, or
            LOAD_ERROR for everything else. Never raises.
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
        return self._loader.load(name, path, generation)

    def unload_adapter(self, name: str) -> LoRAResponse:
        """Admit no more requests for `name`; its slot and memory are freed when the last request releases it.

        Returns:
            SUCCESS, UNLOAD_NAME_NONEXISTENT, or UNLOAD_ERROR with LoRA off. Never raises.
        """
        if not self.config.enable_lora:
            return LoRAResponse(LoRAStatus.UNLOAD_ERROR, f"LoRA adapter {name!r} was not unloaded: {_LORA_IS_OFF}")
        try:
            num_users = self._table.retire(name)
        except AdapterNotFound as error:
            return LoRAResponse(LoRAStatus.UNLOAD_NAME_NONEXISTENT, str(error))
        rest = f"; {num_users} request(s) in progress will finish with it" if num_users else ""
        return LoRAResponse(LoRAStatus.SUCCESS, f"LoRA adapter {name!r} unloaded successfully{rest}")

    @property
    def loras(self) -> dict[str, LoRAModel]:
        """The adapters that admit requests, by name; a copy."""
        return self._table.models()

    def is_lora(self, name: str) -> bool:
        """Whether `name` admits requests."""
        return self._table.find(name) is not None

    def is_active_lora(self, name: str) -> bool:
        """Whether the adapter that requests for `name` would get has a slot."""
        found = self._table.find(name)
        return found is not None and self._table.slot_of(found[0]) is not None

    @property
    def version(self) -> int:
        """Rises with every change of what `residency` returns."""
        return self._table.version

    def residency(self) -> tuple[list[AdapterRef], list[AdapterRef]]:
        """Adapters that admit requests: those in slots, and all of them."""
        return self._table.residency()

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

    def pin(self, ref: AdapterRef) -> None:
        """Keep the adapter in its slot until `unpin`; pins are counted. Raises KeyError if it has no slot."""
        self._table.pin(ref)

    def unpin(self, ref: AdapterRef) -> None:
        """End one `pin`. Raises KeyError if there is none."""
        self._table.unpin(ref)

    def slot_of(self, ref: AdapterRef) -> int | None:
        """The adapter's slot, or None."""
        return self._table.slot_of(ref)

    def can_activate(self, ref: AdapterRef) -> bool:
        """Whether `activate_adapter` would find a slot now: its own, a free one, or one that is not pinned."""
        return self._table.can_activate(ref)

    def activate_adapter(self, name_or_ref: str | AdapterRef) -> int:
        """Give an adapter a slot and write its weights there, or refresh the recency of the slot it has.

        The least recently used adapter that is not pinned makes room.

        Returns:
            The slot.

        Raises:
            KeyError: no such adapter is loaded.
            NoFreeSlot: all slots are pinned.
        """
        put = self._table.activate(name_or_ref)
        if put.is_new:
            try:
                self._inputs.write(put.slot, put.model)
            except BaseException:
                self._table.deactivate(put.ref)
                raise
        return put.slot

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

        The bound routing tensors (see `symbolic_inputs`) are filled with the same triple.

        Args:
            batch: Requests in row order, base requests last.
            row_offsets: First token row of each request and, last, the number of rows: `len(batch) + 1` of them.
            device: Where the step runs.

        Raises:
            KeyError: the adapter of a request has no slot; it is named.
            ValueError: the offsets do not fit the batch, the batch is not sorted, or it has too many rows.
        """
        num_rows = self._check_offsets(batch, row_offsets)
        slots = self._table.use_slots(request.adapter for request in batch)
        tokens = [stop - start for start, stop in pairwise(row_offsets)]
        lora_ids, grouped_offsets, _ = routing_triple(list(zip(slots, tokens, strict=True)))
        routing = build_routing(
            lora_ids,
            grouped_offsets,
            self._slot_ranks(),
            num_rows=num_rows,
            max_groups=self.max_groups,
            device=torch.device(device),
        )
        self._inputs.fill_routing(routing)
        return routing

    def wrap(self, model: nn.Module) -> LoRAModelWrapper:
        """Replace the targets of every decoder layer by LoRA layers, in place; parameter names stay as they are.

        Raises:
            ValueError: the model does not have the declared layers, a target matches nothing, or is wrapped already.
        """
        context = RoutingContext()
        wrap_targets(model, self._sites, context)
        self._inputs.bind_model(model)
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
        """
        residents = self._table.residents()
        self._inputs.bind(tensors, [(slot, model) for slot, (_, model) in residents.items()])

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        self._table.check()

    def _read_adapter(self, name: str, folder: Path) -> LoRAModel:
        model = LoRAModel(
            name,
            str(folder),
            self.base_dtype,
            self.config.max_lora_rank,
            self.n_heads,
            self.n_kv_heads,
            self.head_dim,
            projections=self._projections,
            num_layers=self._num_layers,
        )
        served = {module for site in self._sites for module in site.modules}
        if unserved := sorted(model.ranks.keys() - served):
            raise InvalidAdapter(
                f"it changes modules that this server does not adapt: {', '.join(unserved)}; "
                f"adapted in each layer: {', '.join(path for target in self.targets for path in target.siblings())}"
            )
        return model

    def _check_offsets(self, batch: Sequence[RoutedRequest], row_offsets: Sequence[int]) -> int:
        if len(row_offsets) != len(batch) + 1 or row_offsets[0] != 0:
            raise ValueError(
                f"row_offsets has {len(row_offsets)} entries for {len(batch)} requests; "
                f"expected {len(batch) + 1}, the first of them 0"
            )
        num_rows = int(row_offsets[-1])
        if num_rows > self.max_lora_seq_len:
            raise ValueError(f"the batch has {num_rows} token rows, max_lora_seq_len is {self.max_lora_seq_len}")
        return num_rows

    def _slot_ranks(self) -> list[int]:
        ranks = [0] * self.num_slots
        for slot, (_, model) in self._table.residents().items():
            ranks[slot] = model.rank
        return ranks
