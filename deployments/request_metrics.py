"""`RequestMetrics`: how requests fare, as those who send them see it. Names and buckets are vLLM's."""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import get_args

from deployments.counted_histogram import CountedHistogram
from deployments.generation import GenerateChunk
from deployments.kept_counter import KeptCounter
from deployments.metric_labels import BASE_LABEL, AdapterLabels
from deployments.show_timer import ShowTimer
from lora_core.messages import FinishReason

FIRST_TOKEN_BOUNDS_S = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
]  # fmt: skip
BETWEEN_TOKENS_BOUNDS_S = [
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
]  # fmt: skip
WHOLE_ANSWER_BOUNDS_S = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
]  # fmt: skip


class RequestMetrics:
    """One for each process that answers requests. `docs/metrics.md` lists them.

    Args:
        clock: Seconds, never falling.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.labels = AdapterLabels()
        self.clock = clock
        self.first_token_s = CountedHistogram(
            "vllm_time_to_first_token_seconds", "Seconds from a request to its first token.", FIRST_TOKEN_BOUNDS_S
        )
        self.between_tokens_s = CountedHistogram(
            "vllm_inter_token_latency_seconds", "Seconds between the tokens of an answer.", BETWEEN_TOKENS_BOUNDS_S
        )
        self.whole_answer_s = CountedHistogram(
            "vllm_e2e_request_latency_seconds", "Seconds from a request to its last token.", WHOLE_ANSWER_BOUNDS_S
        )
        self.prompt_tokens = KeptCounter("vllm_prompt_tokens", "Tokens of prompts, cached ones included.", ("adapter",))
        self.cached_tokens = KeptCounter(
            "vllm_prompt_tokens_cached", "Tokens of prompts that were in a prefix cache.", ("adapter",)
        )
        self.generated_tokens = KeptCounter("vllm_generation_tokens", "Tokens of answers.", ("adapter",))
        self.ended = KeptCounter("vllm_request_success", "Answers, by why they ended.", ("adapter", "finished_reason"))
        self.timer = ShowTimer(self._show)
        self._begun: set[str] = set()
        self._let_begin(BASE_LABEL)

    def begin(self, adapter: str | None) -> "SeenRequest":
        """Note a request as it comes; it ends with a `with` block. None is the base model."""
        label = self.labels.of(adapter)
        if label not in self._begun:
            self._let_begin(label)
        return SeenRequest(self, label)

    def _let_begin(self, label: str) -> None:
        """Have the counters of an adapter stand at 0 before there is anything to count."""
        self._begun.add(label)
        for counter in (self.prompt_tokens, self.cached_tokens, self.generated_tokens):
            counter.inc(0, {"adapter": label})
        for reason in get_args(FinishReason):
            self.ended.inc(0, {"adapter": label, "finished_reason": reason})

    def _show(self) -> None:
        for histogram in (self.first_token_s, self.between_tokens_s, self.whole_answer_s):
            histogram.show()


class SeenRequest:
    """One request, from its coming to its end."""

    def __init__(self, metrics: RequestMetrics, label: str) -> None:
        self._metrics = metrics
        self._label = label
        self._came_s = metrics.clock()
        self._has_begun = False
        # Of each of its answers, when its last tokens came.
        self._last_s: dict[int, float] = {}

    def take(self, chunk: GenerateChunk) -> None:
        """Note a piece of an answer.

        Its tokens have come together, and count as if they had come evenly since the piece before.
        """
        metrics, label, now_s = self._metrics, self._label, self._metrics.clock()
        if not self._has_begun:
            self._has_begun = True
            metrics.first_token_s.observe(now_s - self._came_s, label)
            metrics.prompt_tokens.inc(chunk.prompt_tokens, {"adapter": label})
            metrics.cached_tokens.inc(chunk.cached_tokens, {"adapter": label})
        num_tokens = len(chunk.token_ids)
        if num_tokens:
            last_s = self._last_s.get(chunk.index)
            if last_s is not None:
                metrics.between_tokens_s.observe((now_s - last_s) / num_tokens, label, times=num_tokens)
            self._last_s[chunk.index] = now_s
            metrics.generated_tokens.inc(num_tokens, {"adapter": label})
        if chunk.finish_reason is not None:
            metrics.ended.inc(1, {"adapter": label, "finished_reason": chunk.finish_reason})
        metrics.timer.soon()

    def restart(self) -> None:
        """Note that what has come of the answers is lost, and that they come anew."""
        self._last_s.clear()

    def __enter__(self) -> "SeenRequest":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        metrics = self._metrics
        if kind is None:
            metrics.whole_answer_s.observe(metrics.clock() - self._came_s, self._label)
        else:
            has_left = issubclass(kind, GeneratorExit | asyncio.CancelledError)
            reason = "abort" if has_left else "error"
            metrics.ended.inc(1, {"adapter": self._label, "finished_reason": reason})
        metrics.timer.soon()
