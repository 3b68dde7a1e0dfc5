"""Loaded adapters by generation: which one has a name, who uses it, and which only stay until their users are done."""

from collections.abc import Iterable
from dataclasses import dataclass

from lora_core.adapter_record import AdapterRecord
from lora_core.errors import AdapterError, AdapterNotFound
from lora_core.types import AdapterRef


class GenerationTaken(AdapterError, ValueError):
    """An adapter had this generation before, and the new one would be taken for it."""


@dataclass
class Loaded:
    """One generation: what describes it, and how many requests hold it and keep it in its slot."""

    record: AdapterRecord
    num_users: int = 0
    num_pins: int = 0
    read_s: float | None = None
    """How long its files were read for since it last had a slot, if they were."""

    @property
    def is_used(self) -> bool:
        """Whether it must stay."""
        return self.num_users > 0 or self.num_pins > 0


class Generations:
    """Every loaded generation; one for each name admits requests, the others are retired and have some yet.

    Not thread-safe: its owner serialises calls.
    """

    def __init__(self) -> None:
        self._loaded: dict[AdapterRef, Loaded] = {}
        self._admitting: dict[str, AdapterRef] = {}
        self._retired: dict[AdapterRef, None] = {}
        self._given: set[int] = set()
        self._highest = 0

    def __contains__(self, ref: object) -> bool:
        return ref in self._loaded

    def __getitem__(self, ref: AdapterRef) -> Loaded:
        """A loaded generation. Raises KeyError if it is not loaded."""
        try:
            return self._loaded[ref]
        except KeyError:
            raise KeyError(f"LoRA adapter {ref} is not loaded") from None

    def require(self, ref: AdapterRef) -> None:
        """Raise KeyError if a generation is not loaded."""
        self[ref]

    def items(self) -> Iterable[tuple[AdapterRef, Loaded]]:
        """All of them, in load order."""
        return self._loaded.items()

    def find(self, name: str) -> AdapterRef | None:
        """The generation that admits requests for `name`."""
        return self._admitting.get(name)

    def named(self, name: str) -> AdapterRef:
        """The generation that admits requests for `name`. Raises AdapterNotFound, naming those that are."""
        ref = self._admitting.get(name)
        if ref is None:
            known = ", ".join(sorted(self._admitting)) or "none"
            raise AdapterNotFound(f"LoRA adapter {name!r} is not loaded; loaded adapters: {known}")
        return ref

    def admitting(self) -> dict[str, AdapterRef]:
        """Those that admit requests, by name; a copy."""
        return dict(self._admitting)

    def retired(self) -> list[AdapterRef]:
        """Those that do not, and stay until nobody uses them."""
        return list(self._retired)

    def identify(self, name: str, generation: int | None) -> AdapterRef:
        """The identity of an adapter about to be added: the generation that is given, else one above all others.

        Raises:
            GenerationTaken: the generation was given before.
        """
        if generation is None:
            generation = self._highest + 1
        elif generation in self._given:
            raise GenerationTaken(f"generation {generation} was given to an adapter before; each load needs its own")
        self._given.add(generation)
        self._highest = max(self._highest, generation)
        return AdapterRef(name, generation)

    def add(self, ref: AdapterRef, record: AdapterRecord) -> None:
        """Let a generation admit requests for its name, which none does."""
        assert ref.name not in self._admitting, f"two generations admit requests for {ref.name!r}"
        self._loaded[ref] = Loaded(record)
        self._admitting[ref.name] = ref

    def retire(self, ref: AdapterRef) -> None:
        """Let a generation admit no more requests."""
        del self._admitting[ref.name]
        self._retired[ref] = None

    def is_done(self, ref: AdapterRef) -> bool:
        """Whether a generation is retired and unused, and may be removed."""
        return ref in self._retired and not self._loaded[ref].is_used

    def remove(self, ref: AdapterRef) -> None:
        """Forget a retired generation."""
        del self._loaded[ref], self._retired[ref]

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        admitting = set(self._admitting.values())
        assert admitting | self._retired.keys() == self._loaded.keys(), "neither admits nor drains"
        assert not admitting & self._retired.keys(), "a retired generation admits requests"
        assert all(name == ref.name for name, ref in self._admitting.items())
        assert not any(map(self.is_done, self._retired)), "a generation is retired and unused, and still loaded"
        assert all(loaded.num_users >= 0 for loaded in self._loaded.values())
        generations = [ref.generation for ref in self._loaded]
        assert len(set(generations)) == len(generations), "two adapters share a generation"
        assert self._given.issuperset(generations)
