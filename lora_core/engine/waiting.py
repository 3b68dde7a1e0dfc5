"""Requests that wait, by adapter, and in whose turn the adapters are."""

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator

from lora_core.engine.request import Request
from lora_core.types import AdapterRef


class WaitingQueues:
    """One queue for each adapter with waiting requests, and one for the base model (None).

    A queue is in order of arrival. The queues are in the order in which they began to wait: at the end comes the one
    that was empty, and the one of an adapter whose turn in a slot has ended. Whatever is asked costs no more with
    thousands of queues than with a few.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queues: OrderedDict[AdapterRef | None, deque[Request]] = OrderedDict()
        self._since_s: dict[AdapterRef | None, float] = {}
        self._num_requests = 0
        self._next_asked = 0

    def __len__(self) -> int:
        """Requests that wait."""
        return self._num_requests

    def __contains__(self, adapter: object) -> bool:
        """Whether requests of the adapter wait."""
        return adapter in self._queues

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain.from_iterable(self._queues.values())

    @property
    def num_queues(self) -> int:
        """Adapters with requests that wait; the base model counts as one."""
        return len(self._queues)

    def add(self, request: Request) -> None:
        """Queue a request by its arrival, before newer ones of its adapter."""
        request.queued_s = self._clock()
        queue = self._queues.get(request.adapter)
        if queue is None:
            queue = self._queues[request.adapter] = deque()
            self._since_s[request.adapter] = request.queued_s
        place = len(queue)
        while place and queue[place - 1].arrival > request.arrival:
            place -= 1
        queue.insert(place, request)
        self._num_requests += 1

    def first(self, adapter: AdapterRef | None) -> Request:
        """The oldest request of an adapter with waiting ones."""
        return self._queues[adapter][0]

    def remove(self, request: Request) -> None:
        """Take a request out."""
        queue = self._queues[request.adapter]
        if queue[0] is request:
            queue.popleft()
        else:
            queue.remove(request)
        self._num_requests -= 1
        if not queue:
            del self._queues[request.adapter], self._since_s[request.adapter]

    def since_s(self, adapter: AdapterRef | None) -> float:
        """Clock reading when the queue began to wait."""
        return self._since_s[adapter]

    def wait_anew(self, adapter: AdapterRef, since_s: float) -> None:
        """Put an adapter whose turn has ended behind all others, if it has requests that wait."""
        if adapter in self._queues:
            self._queues.move_to_end(adapter)
            self._since_s[adapter] = since_s

    def oldest(self, count: int, but: Container[AdapterRef | None]) -> list[AdapterRef]:
        """The adapters that began to wait first, `count` at most, without those in `but`."""
        found = (adapter for adapter in self._queues if adapter is not None and adapter not in but)
        return list(itertools.islice(found, count))

    def some(self, count: int) -> list[AdapterRef]:
        """`count` adapters at most, others with each call until all have been named."""
        if self._next_asked >= len(self._queues):
            self._next_asked = 0
        found = itertools.islice(self._queues, self._next_asked, self._next_asked + count)
        self._next_asked += count
        return [adapter for adapter in found if adapter is not None]

    def drop(self, adapter: AdapterRef) -> list[Request]:
        """Take out all requests of an adapter."""
        requests = list(self._queues.pop(adapter, ()))
        self._since_s.pop(adapter, None)
        self._num_requests -= len(requests)
        return requests

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        assert self._queues.keys() == self._since_s.keys()
        assert sum(map(len, self._queues.values())) == self._num_requests, "waiting requests are miscounted"
        for adapter, queue in self._queues.items():
            assert queue, f"{adapter} has an empty queue"
            assert all(request.adapter == adapter for request in queue), f"{adapter}: another's request is queued"
            assert all(a.arrival < b.arrival for a, b in itertools.pairwise(queue)), f"{adapter}: out of order"
            for request in queue:
                held = len(request.block_table) + request.num_computed
                assert request.is_parked or not held, f"{request.request_id} waits and holds blocks"
