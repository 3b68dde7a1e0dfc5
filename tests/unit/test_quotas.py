"""Quotas: rates over time, requests at a time, and shares of several ingresses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.access import TenantSettings
from cluster.quotas import RateBucket, TenantQuotas
from lora_core.errors import RateLimited


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_per_minute() -> None:
    clock = Clock()
    quotas = TenantQuotas({"acme": TenantSettings(requests_per_minute=6)}, clock=clock)
    for _ in range(6):
        with quotas.request("acme"):
            pass
    with pytest.raises(RateLimited, match=r"over requests_per_minute, which is 6 for 'acme'; try again in 10 s") as at:
        quotas.request("acme").__enter__()
    assert at.value.retry_after_s == 10
    assert "access.tenants.acme.requests_per_minute" in str(at.value)
    clock.now += 10
    with quotas.request("acme"):
        pass
    with pytest.raises(RateLimited):
        quotas.request("acme").__enter__()


def test_requests_at_a_time() -> None:
    quotas = TenantQuotas({"acme": TenantSettings(concurrent_requests=2), "globex": TenantSettings()})
    with quotas.request("acme"):
        with quotas.request("acme"):
            with pytest.raises(RateLimited, match="over concurrent_requests, which is 2"):
                quotas.request("acme").__enter__()
            with quotas.request("globex"), quotas.request(None), quotas.request("gone"):
                pass
        with quotas.request("acme"):
            pass


def test_a_request_that_fails_no_longer_counts() -> None:
    quotas = TenantQuotas({"acme": TenantSettings(concurrent_requests=1)})
    with pytest.raises(KeyError), quotas.request("acme"):
        raise KeyError
    with quotas.request("acme"):
        pass


def test_tokens_are_reserved_and_settled() -> None:
    clock = Clock()
    quotas = TenantQuotas({"acme": TenantSettings(tokens_per_minute=60)}, clock=clock)
    first = quotas.charge("acme", 50)
    with pytest.raises(RateLimited, match=r"over tokens_per_minute, which is 60"):
        quotas.charge("acme", 20)
    first.settle(10)
    first.settle(30)
    second = quotas.charge("acme", 30)
    # It used more than it said: a chat without a bound, and a long prompt.
    second.settle(90)
    with pytest.raises(RateLimited) as caught:
        quotas.charge("acme", 0)
    assert caught.value.retry_after_s == 61, "what was overdrawn comes in first"
    clock.now += 61
    quotas.charge("acme", 0)


def test_what_comes_beyond_what_was_taken_counts_at_once() -> None:
    quotas = TenantQuotas({"acme": TenantSettings(tokens_per_minute=60)}, clock=Clock())
    endless = quotas.charge("acme", 0)
    endless.grow(50)
    bounded = quotas.charge("acme", 10)
    bounded.grow(4)
    with pytest.raises(RateLimited):
        quotas.charge("acme", 0)
    bounded.settle(4)
    quotas.charge("acme", 6)
    endless.grow(40)
    endless.settle(50)
    with pytest.raises(RateLimited):
        quotas.charge("acme", 0)


def test_what_could_never_fit_waits_for_a_full_minute_and_no_longer() -> None:
    clock = Clock()
    quotas = TenantQuotas({"acme": TenantSettings(tokens_per_minute=60)}, clock=clock)
    quotas.charge("acme", 1000).settle(30)
    with pytest.raises(RateLimited) as caught:
        quotas.charge("acme", 1000)
    clock.now += caught.value.retry_after_s
    quotas.charge("acme", 1000)


def test_no_limits_without_settings() -> None:
    quotas = TenantQuotas({})
    for tenant in (None, "gone"):
        quotas.charge(tenant, 10**9).settle(10**9)
        quotas.charge(tenant, 10**9)


def test_ingresses_share_a_limit() -> None:
    num, clock = [1], Clock()
    settings = TenantSettings(requests_per_minute=8, concurrent_requests=3)
    quotas = TenantQuotas({"acme": settings}, num_sharing=lambda: num[0], clock=clock)
    num[0] = 4
    for _ in range(2):
        with quotas.request("acme"):
            pass
    with pytest.raises(RateLimited, match="which is 8"):
        quotas.request("acme").__enter__()
    clock.now += 3600
    with quotas.request("acme"), pytest.raises(RateLimited, match="concurrent_requests, which is 3"):
        quotas.request("acme").__enter__()


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 120), st.integers(0, 2000), st.integers(0, 2000)), max_size=40),
)
def test_over_any_time_no_more_is_admitted_than_came_in(per_minute: int, asked: list[tuple[float, int, int]]) -> None:
    """With exact reservations, a window of t seconds admits at most the bucket and what comes in within t."""
    now, admitted = 0.0, 0
    bucket = RateBucket(per_minute, now)
    for pause_s, amount, _ in asked:
        now += pause_s
        amount = min(amount, per_minute)
        if bucket.wait_s(amount, now) == 0:
            bucket.take(amount)
            admitted += amount
        assert admitted <= per_minute + now * per_minute / 60 + 0.02 * len(asked)
