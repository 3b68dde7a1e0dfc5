"""`OpenStreams`: requests of one engine process that are not answered to their end, and how long each stands still."""

from dataclasses import dataclass

from cluster.progress import BASE


@dataclass
class OpenStream:
    """One request."""

    name: str
    progressed_s: float


class OpenStreams:
    """Requests in the order in which they came. Its clock moves only by `tick`: while the loop that ticks is held up,
    and answers lie unread, no time passes."""

    def __init__(self) -> None:
        self._streams: dict[str, OpenStream] = {}
        self._now_s = 0.0

    def tick(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds

    def opened(self, request_id: str, lora_name: str | None) -> None:
        """A request was sent; no name is the base model."""
        self._streams[request_id] = OpenStream(lora_name or BASE, self._now_s)

    def progressed(self, request_id: str) -> None:
        """Something was heard of it; an unknown one is ignored."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.progressed_s = self._now_s

    def closed(self, request_id: str) -> None:
        """It has ended, or nobody waits for the rest; an unknown one is ignored."""
        self._streams.pop(request_id, None)

    def of(self, name: str) -> list[str]:
        """Ids of the requests of one adapter, oldest first; of the base model with `BASE`."""
        return [request_id for request_id, stream in self._streams.items() if stream.name == name]

    def idle_s(self) -> dict[str, float]:
        """For each name with requests, seconds since the oldest of them got on, or came."""
        found: dict[str, float] = {}
        for stream in self._streams.values():
            found.setdefault(stream.name, self._now_s - stream.progressed_s)
        return found

    def clear(self) -> None:
        """All have ended."""
        self._streams.clear()
