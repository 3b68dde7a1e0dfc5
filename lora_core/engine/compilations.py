"""Requests that are accepted, and not queued before their constraint is compiled."""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

from lora_core.engine.constraint import ConstraintState
from lora_core.engine.request import Request
from lora_core.errors import LoRAFleetError


class Compilations:
    """Holds requests until the thread that compiles their constraints is done with them; for the step thread."""

    def __init__(self) -> None:
        self._waiting: dict[Request, Future[ConstraintState]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, compilation: "Future[ConstraintState]") -> None:
        """Hold a request until its compilation is done."""
        self._waiting[request] = compilation

    def take_done(self) -> Iterator[tuple[Request, LoRAFleetError | None]]:
        """The requests whose constraints have been compiled, and are theirs now; or why one cannot be, or was not."""
        for request, compilation in list(self._waiting.items()):
            if not compilation.done():
                continue
            del self._waiting[request]
            try:
                request.sampler.constraint = compilation.result()
            except LoRAFleetError as error:
                yield request, error
            else:
                yield request, None

    def cancel(self, request: Request) -> bool:
        """Hold a request no longer; False if it was not held."""
        compilation = self._waiting.pop(request, None)
        if compilation is None:
            return False
        compilation.cancel()
        return True

    def wait(self, timeout_s: float) -> None:
        """Return when a compilation is done, or after the timeout."""
        wait(self._waiting.values(), timeout_s, return_when=FIRST_COMPLETED)
