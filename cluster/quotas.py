"""What tenants may use per minute and at a time."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from cluster.access import TenantSettings
from lora_core.errors import RateLimited

RETRY_AFTER_CONCURRENT_S = 1.0
"""A request over `concurrent_requests` is told to come back after this: when another one ends is not known."""

RETRY_AFTER_OWN_S = 60.0
"""One that waits for the tenant to give something up."""


class RateBucket:
    """A token bucket, which holds what a minute allows and is full at first.

    It may be overdrawn: what is taken beyond what is there has to come in again first.

    Args:
        per_minute: What comes in.
        now: Seconds, on any clock.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_minute = per_minute
        self._level = per_minute
        self._filled_at = now

    def resize(self, per_minute: float, now: float) -> None:
        """Change what comes in from now on."""
        self._fill(now)
        self._per_minute = per_minute
        self._level = min(self._level, per_minute)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount`, or all that the bucket can hold where that is less, is there."""
        self._fill(now)
        lacking = min(amount, self._per_minute) - self._level
        # A hundredth of a token is a rounding error.
        return lacking * 60 / self._per_minute if lacking > 0.01 else 0.0

    def take(self, amount: float) -> None:
        """Take out, or with a negative amount give back."""
        self._level = min(self._level - amount, self._per_minute)

    def _fill(self, now: float) -> None:
        self._level = min(self._per_minute, self._level + (now - self._filled_at) * self._per_minute / 60)
        self._filled_at = now


class Charge:
    """Tokens of one request: as many as it may make were taken in advance, and those it made are what counts."""

    def __init__(self, bucket: RateBucket | None, reserved: int) -> None:
        self._bucket = bucket
        self._reserved = reserved

    def grow(self, num_tokens: int) -> None:
        """Count what the request has used so far, its prompt included, where that is more than was taken: what it may
        yet make stays taken."""
        if num_tokens > self._reserved:
            self.settle(num_tokens)

    def settle(self, num_tokens: int) -> None:
        """Count what the request has used so far, its prompt included; called again, the total counts."""
        if self._bucket is not None:
            self._bucket.take(num_tokens - self._reserved)
            self._reserved = num_tokens


class TenantQuotas:
    """Counts what each tenant uses, and refuses what is over. Not thread-safe: one event loop's.

    Args:
        tenants: Their settings by name; a caller without one has no limits.
        num_sharing: How many of these count beside one another, each its part of the limits: replicas of the ingress.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        tenants: Mapping[str, TenantSettings],
        num_sharing: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tenants = tenants
        self._num_sharing = num_sharing
        self._clock = clock
        self._num_running: Counter[str] = Counter()
        self._buckets: dict[tuple[str, str], RateBucket] = {}

    @contextmanager
    def request(self, tenant: str | None) -> Iterator[None]:
        """Count one request for as long as it runs.

        Raises:
            RateLimited: too many run, or have come within the minute.
        """
        settings = self._tenants.get(tenant) if tenant is not None else None
        if tenant is None or settings is None:
            yield
            return
        if settings.concurrent_requests is not None and self._num_running[tenant] >= self._part(
            settings.concurrent_requests
        ):
            raise over(tenant, "concurrent_requests", settings.concurrent_requests, RETRY_AFTER_CONCURRENT_S)
        bucket = self._bucket(tenant, "requests_per_minute", settings.requests_per_minute)
        if bucket is not None:
            bucket.take(1)
        self._num_running[tenant] += 1
        try:
            yield
        finally:
            self._num_running[tenant] -= 1

    def charge(self, tenant: str | None, most: int) -> Charge:
        """Reserve the tokens a request may make.

        Args:
            tenant: Whose it is.
            most: Tokens of its answers at most, as far as that is known.

        Raises:
            RateLimited: there are not so many left in this minute.
        """
        settings = self._tenants.get(tenant) if tenant is not None else None
        if tenant is None or settings is None:
            return Charge(None, 0)
        bucket = self._bucket(tenant, "tokens_per_minute", settings.tokens_per_minute, max(most, 1))
        if bucket is not None:
            bucket.take(most)
        return Charge(bucket, most)

    def _bucket(self, tenant: str, limit: str, per_minute: int | None, amount: int = 1) -> RateBucket | None:
        """The bucket of a limit, where `amount` can be taken from it; None where there is no limit."""
        if per_minute is None:
            return None
        now, part = self._clock(), per_minute / max(1, self._num_sharing())
        bucket = self._buckets.get((tenant, limit))
        if bucket is None:
            bucket = self._buckets[tenant, limit] = RateBucket(max(1.0, part), now)
        bucket.resize(max(1.0, part), now)
        wait_s = bucket.wait_s(amount, now)
        if wait_s > 0:
            raise over(tenant, limit, per_minute, wait_s)
        return bucket

    def _part(self, limit: int) -> int:
        return math.ceil(limit / max(1, self._num_sharing()))


def over(tenant: str, limit: str, value: int, retry_after_s: float, advice: str = "") -> RateLimited:
    """A refusal that says which limit, its value, and who can raise it."""
    wait_s = max(1, math.ceil(retry_after_s))
    what = advice or f"try again in {wait_s} s"
    return RateLimited(
        f"over {limit}, which is {value} for {tenant!r}; {what}. "
        f"The operator of this server can raise it (access.tenants.{tenant}.{limit})",
        wait_s,
    )
