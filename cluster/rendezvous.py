"""In which order an adapter prefers the replicas: rendezvous hashing (Thaler and Ravishankar 1998).

Every process computes the same order from names alone, and a replica that joins or leaves moves only its own share.
"""

import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
"""64 bits for each of some replicas."""

_MASK = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK = 1 << 20
"""Pairs of adapter and replica whose weights are in memory at once."""


def weight(adapter: str, replica_id: str) -> int:
    """Weight of a pair: 64 bits, the same in every process."""
    mixed = adapter_hash(adapter) ^ _replica_hash(replica_id)
    mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _MASK
    return mixed ^ (mixed >> 31)


def hash_order(adapter: str, replica_ids: Iterable[str]) -> list[str]:
    """All replicas in rendezvous order for an adapter."""
    return sorted(replica_ids, key=lambda replica_id: (-weight(adapter, replica_id), replica_id))


@functools.lru_cache(maxsize=1 << 17)
def adapter_hash(adapter: str) -> int:
    """64 bits of an adapter's name."""
    return _digest(adapter, b"adapter")


def replica_hashes(replica_ids: Iterable[str]) -> Hashes:
    """64 bits of each replica's id, `[R]`, for `weights`."""
    return np.array([_replica_hash(replica_id) for replica_id in replica_ids], dtype=np.uint64)


def weights(adapter: str, replicas: Hashes) -> Hashes:
    """`weight` of an adapter with each replica, `[R]`."""
    return _mixed(replicas ^ np.uint64(adapter_hash(adapter)))


def first_choices(adapters: Sequence[str], replica_ids: Sequence[str]) -> list[str]:
    """For each adapter the replica that is first in its order. `replica_ids` is sorted, and not empty."""
    replicas = replica_hashes(replica_ids)
    rows = max(1, _CHUNK // len(replica_ids))
    firsts: list[str] = []
    for start in range(0, len(adapters), rows):
        names = np.array([adapter_hash(name) for name in adapters[start : start + rows]], dtype=np.uint64)
        best = _mixed(names[:, None] ^ replicas[None, :]).argmax(axis=1)
        firsts += [replica_ids[index] for index in best.tolist()]
    return firsts


def _mixed(pairs: NDArray[Any]) -> Hashes:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), which turns every bit of a pair into half of them."""
    pairs = (pairs ^ (pairs >> np.uint64(30))) * np.uint64(_FIRST)
    pairs = (pairs ^ (pairs >> np.uint64(27))) * np.uint64(_SECOND)
    mixed: Hashes = pairs ^ (pairs >> np.uint64(31))
    return mixed


@functools.lru_cache(maxsize=1 << 14)
def _replica_hash(replica_id: str) -> int:
    return _digest(replica_id, b"replica")


def _digest(name: str, kind: bytes) -> int:
    return int.from_bytes(
        hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8, person=kind).digest(), "big"
    )
