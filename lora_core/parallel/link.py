"""The private connection between the first rank and another one: typed messages in order, each with bytes behind it."""

import socket
import struct
from typing import Any

import msgspec

from lora_core.parallel.rank_messages import RankMessage

_HEADER = struct.Struct("<IQ")


class Link:
    """One end of a pair of connected sockets that have no name; the other end is in another process.

    It ends when either process does.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[RankMessage] = msgspec.msgpack.Decoder(RankMessage)

    @classmethod
    def pair(cls) -> "tuple[Link, socket.socket]":
        """An end for this process, and the socket that the other process makes its end of."""
        own, other = socket.socketpair()
        return cls(own), other

    def encode(self, message: RankMessage) -> bytes:
        """A message as `send_encoded` takes it, for several links."""
        return self._encoder.encode(message)

    def send(self, message: RankMessage, payload: Any = b"", timeout_s: float | None = None) -> None:
        """Send a message.

        Args:
            message: The message.
            payload: Bytes that go with it, or anything that holds some in one piece.
            timeout_s: Longest wait for the other end to take it; unset: for ever.

        Raises:
            OSError: the other end is gone, or took it not in time.
        """
        self.send_encoded(self.encode(message), payload, timeout_s)

    def send_encoded(self, message: bytes, payload: Any = b"", timeout_s: float | None = None) -> None:
        """Send what `encode` made of a message, as `send` does."""
        content = memoryview(payload).cast("B")
        self._socket.settimeout(timeout_s)
        self._socket.sendall(_HEADER.pack(len(message), len(content)) + message)
        if len(content):
            self._socket.sendall(content)

    def receive(self, timeout_s: float | None = None) -> tuple[RankMessage, bytearray] | None:
        """The next message and its bytes; None when the other end is gone.

        Raises:
            TimeoutError: none came in time.
        """
        self._socket.settimeout(timeout_s)
        header = self._read(_HEADER.size)
        if header is None:
            return None
        num_message, num_payload = _HEADER.unpack(header)
        message, payload = self._read(num_message), self._read(num_payload)
        if message is None or payload is None:
            return None
        return self._decoder.decode(message), payload

    def close(self) -> None:
        """End the connection; may be called again."""
        self._socket.close()

    def _read(self, num_bytes: int) -> bytearray | None:
        """So many bytes; None when the other end is gone before they came."""
        content = bytearray(num_bytes)
        left = memoryview(content)
        while left:
            try:
                num_read = self._socket.recv_into(left)
            except ConnectionError:
                return None
            if num_read == 0:
                return None
            left = left[num_read:]
        return content
