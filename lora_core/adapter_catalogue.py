"""The adapters of one engine as its users see them: loaded, described, held by requests, pinned, and unloaded."""

from collections.abc import Callable, Collection

import msgspec

from lora_core.adapter_record import AdapterRecord
from lora_core.adapters import AdapterTable
from lora_core.config import LoRAConfig
from lora_core.errors import AdapterNotFound, LoRADisabled
from lora_core.load_times import LoadTimes
from lora_core.loader import AdapterLoader, LoadRequest
from lora_core.messages import Residency
from lora_core.model import LoRAModel
from lora_core.operator_pins import PinRefused
from lora_core.readiness import Readiness
from lora_core.types import AdapterRef, AdapterStatus, LoRAResponse, LoRAStatus
from lora_core.workload import SlotCounts

_LORA_IS_OFF = "this server runs with enable_lora: false; set it to true to serve adapters"


class AdapterCatalogue:
    """What can be asked and told of an engine's adapters without the model that they change; from any thread.

    An adapter's identity is its generation (`AdapterRef`): a name that is unloaded, replaced or loaded again has a new
    one, and requests that acquired the old one keep its weights until they release it.
    """

    def __init__(
        self, config: LoRAConfig, table: AdapterTable[LoRAModel], loader: AdapterLoader[LoRAModel], times: LoadTimes
    ) -> None:
        """With the adapters of a table.

        Args:
            config: Whether adapters are served, how many at once, and how large.
            table: The adapters and their slots.
            loader: Brings adapters into the table.
            times: Of loads, measured.
        """
        self.config = config
        self._table, self._loader, self._times = table, loader, times

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
