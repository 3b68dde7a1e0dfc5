"""Seeds of the answers to one request."""

import hashlib


def choice_seed(seed: int, index: int) -> int:
    """The seed of a request's answer `index`, from that of the request.

    The first answer has the request's own, so that it is the same whatever `n` is. The others' are a hash: unlike
    `seed + index` (vLLM's), they are not those of a request with the next seed.
    """
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest(), "little")
