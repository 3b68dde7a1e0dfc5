"""Which adapters are loaded, who is using them, and which slot each one has."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from lora_core.errors import AdapterNameTaken, AdapterNotFound
from lora_core.slots import _LoRALRUCache
from lora_core.types import AdapterRef

M = TypeVar("M")


@dataclass(frozen=True)
class Activation(Generic[M]):
    """Where an adapter was put, and whether the slot's content must now be written."""

    ref: AdapterRef
    model: M
    slot: int
    is_new: bool


@dataclass
class _Loaded(Generic[M]):
    model: M
    users: int = 0


class AdapterTable(Generic[M]):
    """The adapters of one engine, by generation.

    A name admits requests from `add` to `retire`. A retired generation stays, with its slot, until its last user has
    released it and its slot is unpinned; then its slot is freed and its model is dropped.

    Thread-safe: every method holds one lock, and none of them does more than look at dictionaries.
    """

    def __init__(self, num_slots: int) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[AdapterRef, _Loaded[M]] = {}
        self._admitting: dict[str, AdapterRef] = {}
        self._slots: _LoRALRUCache[AdapterRef, M] = _LoRALRUCache(num_slots)
        self._generations: set[int] = set()
        self._changes = 0

    @property
    def version(self) -> int:
        """Rises with every change of what is loaded, what admits requests, or what is in which slot."""
        with self._lock:
            return self._changes + self._slots.version

    def add(self, name: str, model: M, generation: int | None = None) -> AdapterRef:
        """Admit requests for `name`, under the given generation or a fresh one.

        Raises:
            AdapterNameTaken: the name already admits requests.
            ValueError: the generation was given to an adapter before.
        """
        with self._lock:
            if name in self._admitting:
                raise AdapterNameTaken(f"LoRA adapter {name!r} is already loaded; unload it first")
            if generation is None:
                generation = max(self._generations, default=0) + 1
            elif generation in self._generations:
                raise ValueError(f"generation {generation} was given to an adapter before; each load needs its own")
            self._generations.add(generation)
            ref = AdapterRef(name, generation)
            self._loaded[ref] = _Loaded(model)
            self._admitting[name] = ref
            self._changes += 1
            return ref

    def retire(self, name: str) -> int:
        """Admit no more requests for `name`, and drop its adapter once nobody uses it.

        Returns:
            How many users still hold it.

        Raises:
            AdapterNotFound: the name admits no requests.
        """
        with self._lock:
            ref = self._admitted(name)
            del self._admitting[name]
            self._changes += 1
            users = self._loaded[ref].users
            self._drop_if_unused(ref)
            return users

    def find(self, name: str) -> tuple[AdapterRef, M] | None:
        """The adapter that requests for `name` would get."""
        with self._lock:
            ref = self._admitting.get(name)
            return None if ref is None else (ref, self._loaded[ref].model)

    def models(self) -> dict[str, M]:
        """The adapters that admit requests, by name."""
        with self._lock:
            return {name: self._loaded[ref].model for name, ref in self._admitting.items()}

    def acquire(self, name: str) -> AdapterRef:
        """Count a user of `name`'s adapter, which stays loaded until the user calls `release`.

        Raises:
            AdapterNotFound: the name admits no requests.
        """
        with self._lock:
            ref = self._admitted(name)
            self._loaded[ref].users += 1
            return ref

    def release(self, ref: AdapterRef) -> None:
        """End one `acquire`.

        Raises:
            KeyError: there is no such user.
        """
        with self._lock:
            if self._existing(ref).users == 0:
                raise KeyError(f"LoRA adapter {ref} has no user to release")
            self._loaded[ref].users -= 1
            self._drop_if_unused(ref)

    def activate(self, name_or_ref: str | AdapterRef) -> Activation[M]:
        """Give an adapter a slot, or refresh the recency of the one it has.

        Raises:
            KeyError: no such adapter is loaded.
            NoFreeSlot: all slots are pinned.
        """
        with self._lock:
            ref = self._admitting.get(name_or_ref) if isinstance(name_or_ref, str) else name_or_ref
            if ref is None:
                raise KeyError(f"LoRA adapter {name_or_ref!r} is not loaded")
            model = self._existing(ref).model
            is_new = ref not in self._slots
            _, slot = self._slots.put(ref, model)
            return Activation(ref, model, slot, is_new)

    def deactivate(self, ref: AdapterRef) -> None:
        """Free the adapter's slot, if it has one.

        Raises:
            ValueError: the slot is pinned.
        """
        with self._lock:
            self._slots.remove(ref)

    def can_activate(self, ref: AdapterRef) -> bool:
        """Whether `activate` would find a slot now."""
        with self._lock:
            return self._slots.can_put(ref)

    def pin(self, ref: AdapterRef) -> None:
        """Keep the adapter in its slot until `unpin`. Raises KeyError if it has none."""
        with self._lock:
            self._slots.pin(ref)

    def unpin(self, ref: AdapterRef) -> None:
        """End one `pin`. Raises KeyError if there is none."""
        with self._lock:
            self._slots.unpin(ref)
            self._drop_if_unused(ref)

    def slot_of(self, ref: AdapterRef) -> int | None:
        """The adapter's slot, or None."""
        with self._lock:
            return self._slots.get_slot(ref)

    def use_slots(self, refs: Iterable[AdapterRef | None]) -> list[int | None]:
        """Slot of each adapter (None for each None), refreshing their recency.

        Raises:
            KeyError: an adapter has no slot; it is named.
        """
        with self._lock:
            slots: list[int | None] = []
            for ref in refs:
                _, slot = (None, None) if ref is None else self._slots.get(ref)
                if ref is not None and slot is None:
                    raise KeyError(f"LoRA adapter {ref} has no slot; activate it before its requests are routed")
                slots.append(slot)
            return slots

    def residents(self) -> dict[int, tuple[AdapterRef, M]]:
        """What is in each taken slot, adapters that no longer admit requests included."""
        with self._lock:
            return {slot: (ref, model) for ref, (model, slot) in self._slots.items()}

    def residency(self) -> tuple[list[AdapterRef], list[AdapterRef]]:
        """Adapters that admit requests: those in slots (by slot), and all of them (in load order)."""
        with self._lock:
            by_slot = sorted((slot, ref) for ref, (_, slot) in self._slots.items())
            resident = [ref for _, ref in by_slot if self._admitting.get(ref.name) == ref]
            return resident, list(self._admitting.values())

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        with self._lock:
            self._slots.check()
            assert set(self._admitting.values()) <= self._loaded.keys(), "a name admits an adapter that is gone"
            assert all(name == ref.name for name, ref in self._admitting.items())
            assert set(self._slots.keys()) <= self._loaded.keys(), "a slot holds an adapter that is gone"
            for ref, (model, _) in self._slots.items():
                assert model is self._loaded[ref].model, f"the slot of {ref} holds another model"
            for ref, loaded in self._loaded.items():
                assert loaded.users >= 0
                is_kept = ref in self._admitting.values() or loaded.users > 0 or self._slots.is_pinned(ref)
                assert is_kept, f"{ref} is retired and unused, and still loaded"
            generations = [ref.generation for ref in self._loaded]
            assert len(set(generations)) == len(generations), "two adapters share a generation"

    def _admitted(self, name: str) -> AdapterRef:
        try:
            return self._admitting[name]
        except KeyError:
            known = ", ".join(sorted(self._admitting)) or "none"
            raise AdapterNotFound(f"LoRA adapter {name!r} is not loaded; loaded adapters: {known}") from None

    def _existing(self, ref: AdapterRef) -> _Loaded[M]:
        try:
            return self._loaded[ref]
        except KeyError:
            raise KeyError(f"LoRA adapter {ref} is not loaded") from None

    def _drop_if_unused(self, ref: AdapterRef) -> None:
        is_admitting = self._admitting.get(ref.name) == ref
        if is_admitting or self._loaded[ref].users > 0 or self._slots.is_pinned(ref):
            return
        self._slots.remove(ref)
        del self._loaded[ref]
        self._changes += 1
