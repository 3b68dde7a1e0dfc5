"""Links between a replica and its engine process: typed msgpack messages over private ZMQ `ipc://` sockets.

Every link is a PUSH socket at one end and a PULL socket at the other. The replica binds, the engine process connects,
in any order: what is sent before the peer is there waits for it. Neither end waits for a slow peer: messages
queue in memory without limit, since a replica that stops reading, or an engine that does, is replaced whole.
"""

import collections
import contextlib
import logging
import os
import threading
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from lora_core.errors import ConfigError, EngineDead

M = TypeVar("M")

logger = logging.getLogger(__name__)

_MAX_IPC_PATH_BYTES = 107
"""What `sockaddr_un` holds on Linux, less its final NUL."""

_LINGER_MS = 1000
_RETRY_S = 0.001
_MAX_RETRY_S = 0.05


def endpoint(zmq_endpoint_base: str, suffix: str) -> str:
    """Address of one link.

    Raises:
        ConfigError: it is not an `ipc://` address, or its path is longer than a Unix socket's may be.
    """
    return _checked(f"{zmq_endpoint_base}-{suffix}")


def _checked(address: str) -> str:
    path = address.removeprefix("ipc://")
    if path == address:
        raise ConfigError(f"ZMQ endpoint {address!r} is not private to this host, expected ipc://<path>")
    length = len(os.fsencode(path))
    if length > _MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"ZMQ endpoint path {path!r} has {length} bytes, a Unix socket's at most {_MAX_IPC_PATH_BYTES}; "
            "set TMPDIR to a shorter folder"
        )
    return address


def _attach(socket: Any, address: str, *, bind: bool) -> None:
    socket.set_hwm(0)
    try:
        if bind:
            socket.bind(_checked(address))
        else:
            socket.connect(_checked(address))
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(f"ZMQ endpoint {address!r} cannot be opened: {error}; does its folder exist?") from error
    except ConfigError:
        socket.close(0)
        raise


class MessageSender:
    """Sends typed messages in order, without ever waiting for the peer. Safe to call from any thread."""

    def __init__(self, address: str, *, bind: bool) -> None:
        """Open the sending end.

        Raises:
            ConfigError: the address cannot be opened.
        """
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        # A bound PUSH socket has nowhere to queue until a peer connects; this is where messages wait for the first one.
        self._waiting: collections.deque[bytes] = collections.deque()
        self._closed = threading.Event()
        self._pusher: threading.Thread | None = None
        try:
            _attach(self._socket, address, bind=bind)
        except ConfigError:
            self._context.term()
            raise

    def send(self, message: Any) -> None:
        """Send one message, or keep it for when the peer is there.

        Raises:
            EngineDead: this end is closed.
        """
        payload = self._encoder.encode(message)
        with self._lock:
            if self._closed.is_set():
                raise EngineDead(f"a {type(message).__name__} was sent on a closed channel; the engine is shut down")
            self._waiting.append(payload)
            if self._push() or self._pusher is not None:
                return
            self._pusher = threading.Thread(target=self._push_until_empty, name="message-sender", daemon=True)
            self._pusher.start()

    def close(self, linger_ms: int = _LINGER_MS) -> None:
        """Close this end, giving messages already sent up to `linger_ms` to leave; safe to call again."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            pusher = self._pusher
        if pusher is not None:
            pusher.join()
        if self._waiting:
            logger.warning("%d messages were never taken by a peer and are dropped", len(self._waiting))
        self._socket.close(linger_ms)
        self._context.term()

    def _push(self) -> bool:
        """Hand waiting messages to ZMQ; False if there is no peer yet."""
        while self._waiting:
            try:
                self._socket.send(self._waiting[0], zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._waiting.popleft()
        return True

    def _push_until_empty(self) -> None:
        delay_s = _RETRY_S
        while not self._closed.wait(delay_s):
            delay_s = min(2 * delay_s, _MAX_RETRY_S)
            with self._lock:
                if self._push():
                    self._pusher = None
                    return


class MessageReceiver(Generic[M]):
    """Receives typed messages by polling. For one thread."""

    def __init__(self, address: str, message_type: Any, *, bind: bool) -> None:
        """Open the receiving end; `message_type` is M, which may be a union of tagged structs.

        Raises:
            ConfigError: the address cannot be opened.
        """
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        try:
            _attach(self._socket, address, bind=bind)
        except ConfigError:
            self._context.term()
            raise

    def poll(self, timeout_ms: int = 0) -> list[M]:
        """All messages that have arrived, in order, waiting up to `timeout_ms` for the first."""
        messages: list[M] = []
        if not self._socket.poll(timeout_ms):
            return messages
        with contextlib.suppress(zmq.Again):
            while True:
                _decode_into(messages, self._decoder, self._socket.recv(zmq.NOBLOCK))
        return messages

    def close(self) -> None:
        """Close this end; messages not yet polled are dropped. Safe to call again."""
        if not self._socket.closed:
            self._socket.close(0)
            self._context.term()


class AsyncMessageReceiver(Generic[M]):
    """Receives typed messages on an asyncio loop."""

    def __init__(self, address: str, message_type: Any, *, bind: bool) -> None:
        """Open the receiving end, on the running loop; `message_type` is M.

        Raises:
            ConfigError: the address cannot be opened.
        """
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        try:
            _attach(self._socket, address, bind=bind)
        except ConfigError:
            self._context.term()
            raise

    async def recv(self) -> M:
        """The next message, whenever it comes. Cancelling may lose one that has just arrived."""
        messages: list[M] = []
        while not messages:
            _decode_into(messages, self._decoder, await self._socket.recv())
        return messages[0]

    def close(self) -> None:
        """Close this end; messages not yet received are dropped. Safe to call again."""
        if not self._socket.closed:
            self._socket.close(0)
            self._context.term()


def _decode_into(messages: list[M], decoder: msgspec.msgpack.Decoder[M], payload: bytes) -> None:
    """Decode a message; one that is not of its channel's type is logged and left out, so that the next ones arrive."""
    try:
        messages.append(decoder.decode(payload))
    except msgspec.MsgspecError as error:
        logger.error("A message of %d bytes was not understood and is dropped: %s", len(payload), error)
