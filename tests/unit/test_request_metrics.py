"""What is counted of a request, as whoever sends it sees it."""

import asyncio

import pytest

from deployments.counted_histogram import CountedHistogram
from deployments.generation import GenerateChunk
from deployments.request_metrics import RequestMetrics
from deployments.show_timer import SHOWN_EVERY_S, ShowTimer
from lora_core.messages import FinishReason
from tests.unit.recorded_metrics import Shown, shown


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


pytestmark = pytest.mark.usefixtures("recorded_metrics")


def counted(name: str) -> Shown:
    """What a counter has counted, without those series that still stand at 0."""
    return {labels: value for labels, value in shown(f"{name}_total").items() if value}


def piece(num_tokens: int, index: int = 0, finish_reason: FinishReason | None = None) -> GenerateChunk:
    return GenerateChunk(
        text="", token_ids=[7] * num_tokens, index=index, finish_reason=finish_reason, prompt_tokens=11, cached_tokens=4
    )


def test_a_histogram_shows_the_series_prometheus_expects() -> None:
    histogram = CountedHistogram("wait", "Seconds.", [0.1, 1.0])
    for value, times in ((0.05, 1), (0.1, 1), (0.5, 3), (7.0, 1)):
        histogram.observe(value, "a", times)
    histogram.observe(0.5, "b")
    assert not shown("wait_count"), "nothing is shown before it is asked for"
    histogram.show()
    assert shown("wait_bucket") == {
        ("a", "0.1"): 2, ("a", "1.0"): 5, ("a", "+Inf"): 6, ("b", "0.1"): 0, ("b", "1.0"): 1, ("b", "+Inf"): 1,
    }  # fmt: skip
    assert shown("wait_count") == {("a",): 6, ("b",): 1}
    assert shown("wait_sum") == {("a",): pytest.approx(8.65), ("b",): 0.5}


def test_a_histogram_without_adapters_has_no_such_label() -> None:
    histogram = CountedHistogram("wait", "Seconds.", [0.1], by_adapter=False)
    histogram.observe(0.05)
    histogram.show()
    assert shown("wait_bucket") == {("0.1",): 1, ("+Inf",): 1}
    assert shown("wait_sum") == {(): 0.05}


def test_tokens_that_come_together_count_as_if_they_had_come_evenly(clock: Clock) -> None:
    metrics = RequestMetrics(clock)
    with metrics.begin("tuned") as seen:
        clock.now_s += 0.5
        seen.take(piece(2))
        clock.now_s += 0.6
        seen.take(piece(4))
        clock.now_s += 0.3
        seen.take(piece(0, finish_reason="stop"))
    assert shown("vllm_time_to_first_token_seconds_sum") == {("tuned",): pytest.approx(0.5)}
    assert shown("vllm_inter_token_latency_seconds_count") == {("tuned",): 4}, "the first piece has none before it"
    assert shown("vllm_inter_token_latency_seconds_sum") == {("tuned",): pytest.approx(0.6)}
    assert shown("vllm_e2e_request_latency_seconds_sum") == {("tuned",): pytest.approx(1.4)}
    assert counted("vllm_generation_tokens") == {("tuned",): 6}
    assert counted("vllm_prompt_tokens") == {("tuned",): 11}
    assert counted("vllm_prompt_tokens_cached") == {("tuned",): 4}
    assert counted("vllm_request_success") == {("tuned", "stop"): 1}


def test_each_answer_of_a_request_has_its_own_pace_and_end(clock: Clock) -> None:
    metrics = RequestMetrics(clock)
    with metrics.begin(None) as seen:
        for index in (0, 1):
            clock.now_s += 1
            seen.take(piece(1, index))
        for index in (0, 1):
            clock.now_s += 1
            seen.take(piece(1, index, "length"))
    assert shown("vllm_time_to_first_token_seconds_count") == {("(base)",): 1}
    assert shown("vllm_inter_token_latency_seconds_sum") == {("(base)",): 4.0}, "two seconds from each first token"
    assert counted("vllm_prompt_tokens") == {("(base)",): 11}, "of one request, once"
    assert counted("vllm_request_success") == {("(base)", "length"): 2}


def test_the_time_of_a_lost_try_is_not_one_between_tokens(clock: Clock) -> None:
    metrics = RequestMetrics(clock)
    with metrics.begin("a") as seen:
        seen.take(piece(1))
        clock.now_s += 30
        seen.restart()
        seen.take(piece(1))
        clock.now_s += 1
        seen.take(piece(1, finish_reason="stop"))
    assert shown("vllm_inter_token_latency_seconds_sum") == {("a",): 1.0}
    assert shown("vllm_time_to_first_token_seconds_count") == {("a",): 1}


@pytest.mark.parametrize(
    ("error", "reason"), [(GeneratorExit(), "abort"), (asyncio.CancelledError(), "abort"), (ValueError(), "error")]
)
def test_a_request_that_does_not_end_well_is_counted_by_why(clock: Clock, error: BaseException, reason: str) -> None:
    metrics = RequestMetrics(clock)
    seen = metrics.begin("a")
    seen.take(piece(1))
    with pytest.raises(type(error)), seen:
        raise error
    assert counted("vllm_request_success") == {("a", reason): 1}
    assert not shown("vllm_e2e_request_latency_seconds_count")


def test_counters_stand_at_0_before_there_is_anything_to_count(clock: Clock) -> None:
    metrics = RequestMetrics(clock)
    reasons = ("stop", "length", "abort", "error")
    assert shown("vllm_request_success_total") == {("(base)", reason): 0 for reason in reasons}
    for name in ("vllm_prompt_tokens", "vllm_prompt_tokens_cached", "vllm_generation_tokens"):
        assert shown(f"{name}_total") == {("(base)",): 0}
    with metrics.begin("a") as seen:
        assert shown("vllm_request_success_total") == {(who, why): 0 for who in ("(base)", "a") for why in reasons}
        seen.take(piece(1, finish_reason="stop"))
    metrics.begin("a")
    assert counted("vllm_request_success") == {("a", "stop"): 1}, "nothing begins twice"


async def test_what_changes_often_is_shown_once_in_a_while() -> None:
    times: list[None] = []
    timer = ShowTimer(lambda: times.append(None))
    for _ in range(100):
        timer.soon()
    assert not times
    await asyncio.sleep(SHOWN_EVERY_S + 0.1)
    assert len(times) == 1
    timer.soon()
    await asyncio.sleep(SHOWN_EVERY_S + 0.1)
    assert len(times) == 2, "also what has changed since"
