"""`OpenRequests`: the requests of an engine that have not ended, and how some ended between two steps."""

from collections.abc import Iterator

from lora_core.engine.deltas import failure
from lora_core.engine.request import Request
from lora_core.errors import InvalidRequest, LoRAFleetError
from lora_core.messages import TokenDelta


class OpenRequests:
    """By their ids, and in the order in which they came. A refusal is kept until it is told, or nobody wants it."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._refusals: list[TokenDelta] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """A copy: they may end meanwhile."""
        return iter(list(self._requests.values()))

    def __contains__(self, request: object) -> bool:
        """Whether it has not ended."""
        return isinstance(request, Request) and self._requests.get(request.request_id) is request

    def check_id(self, request_id: str) -> None:
        """Raise InvalidRequest for an id that is in use."""
        if request_id in self._requests:
            raise InvalidRequest(f"request id {request_id!r} is in use; give each request its own")

    def add(self, request: Request) -> None:
        """Take note of a request that has come; its id is not in use."""
        self._requests[request.request_id] = request

    def find(self, request_id: str) -> Request | None:
        """The request of an id."""
        return self._requests.get(request_id)

    def end(self, request: Request) -> None:
        """Forget a request."""
        del self._requests[request.request_id]

    @property
    def has_refusals(self) -> bool:
        """Whether there are some to be told."""
        return bool(self._refusals)

    def refuse(self, request_id: str, error: LoRAFleetError) -> None:
        """Have it told why a request was not taken, or why one that has ended did."""
        self._refusals.append(failure(request_id, str(error), type(error).__name__))

    def take_back(self, request_id: str) -> None:
        """Tell nobody of the refusal of a request."""
        self._refusals = [delta for delta in self._refusals if delta.request_id != request_id]

    def take_refusals(self) -> list[TokenDelta]:
        """Those not told yet."""
        taken, self._refusals = self._refusals, []
        return taken
