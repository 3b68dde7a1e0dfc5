"""What a request must be to enter the engine, and when its answer ends."""

import pytest

from lora_core.engine.request import Limits, Request, ScheduledBatch, ScheduledRow, check
from lora_core.errors import InvalidRequest
from lora_core.messages import Constraint, GenerateRequest, SamplingParams
from lora_core.types import AdapterRef

LIMITS = Limits(max_model_len=64, kv_cache_tokens=32, vocab_size=100, eos_token_ids=frozenset({2}))
EOS = frozenset({2})


def make_request(output: list[int], **sampling: object) -> Request:
    return Request(
        request_id="r",
        token_ids=[5, 6, 7, *output],
        num_prompt_tokens=3,
        arrival=0,
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
    )


def test_a_request_at_every_limit_is_accepted() -> None:
    sampling = SamplingParams(
        max_tokens=28, temperature=0.0, top_p=1.0, top_k=0, seed=2**64 - 1, stop_token_ids=(0, 99)
    )
    check(GenerateRequest("r", [0, 99, 1, 2], sampling), LIMITS)
    check(GenerateRequest("r", [1], SamplingParams(max_tokens=1, seed=-(2**63), top_p=1e-6, top_k=10**6)), LIMITS)
    sampling = SamplingParams(
        max_tokens=3, min_tokens=3, min_p=1, repetition_penalty=0.01, presence_penalty=-2, frequency_penalty=2,
        logit_bias=((0, -100), (99, 100)), logprobs=20, prompt_logprobs=0, constraint=Constraint("regex", "a" * 65536),
    )  # fmt: skip
    check(GenerateRequest("r", [1], sampling), LIMITS)
    # One token that does not end the answer is left.
    stops = tuple(range(3, 100))
    check(GenerateRequest("r", [1], SamplingParams(min_tokens=3, stop_token_ids=(1, *stops))), LIMITS)
    check(
        GenerateRequest("r", [1], SamplingParams(min_tokens=3, stop_token_ids=(0, 1, *stops), ignore_eos=True)), LIMITS
    )


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ([], {}, ["prompt is empty"]),
        ([1, 100], {}, ["prompt token id 100", "0 to 99"]),
        ([-1], {}, ["prompt token id -1", "0 to 99"]),
        ([1], {"max_tokens": 0}, ["max_tokens is 0", "at least 1"]),
        ([1], {"max_tokens": -3}, ["max_tokens is -3"]),
        ([1], {"temperature": -0.1}, ["temperature is -0.1"]),
        ([1], {"temperature": float("nan")}, ["temperature is nan"]),
        ([1], {"temperature": float("inf")}, ["temperature is inf"]),
        ([1], {"top_p": 0.0}, ["top_p is 0", "at most 1"]),
        ([1], {"top_p": 1.01}, ["top_p is 1.01"]),
        ([1], {"top_p": float("nan")}, ["top_p is nan"]),
        ([1], {"min_p": 1.5}, ["min_p is 1.5", "0 to 1"]),
        ([1], {"min_p": float("nan")}, ["min_p is nan"]),
        ([1], {"repetition_penalty": 0.0}, ["repetition_penalty is 0.0", "0.01 to 100"]),
        ([1], {"presence_penalty": -2.5}, ["presence_penalty is -2.5", "-2 to 2"]),
        ([1], {"frequency_penalty": float("nan")}, ["frequency_penalty is nan"]),
        ([1], {"min_tokens": -1}, ["min_tokens is -1"]),
        ([1], {"min_tokens": 9, "max_tokens": 8}, ["min_tokens is 9", "max_tokens 8"]),
        ([1], {"logprobs": 21}, ["logprobs is 21", "0 to 20"]),
        ([1], {"logprobs": -1}, ["logprobs is -1"]),
        ([1], {"prompt_logprobs": 21}, ["prompt_logprobs is 21", "0 to 20"]),
        ([1], {"logit_bias": ((100, 1.0),)}, ["logit_bias key 100", "0 to 99"]),
        ([1], {"logit_bias": ((5, 100.5),)}, ["logit_bias of token 5 is 100.5", "-100 to 100"]),
        ([1], {"logit_bias": ((5, float("nan")),)}, ["logit_bias of token 5 is nan"]),
        ([1], {"logit_bias": ((5, 1.0), (5, 2.0))}, ["twice"]),
        ([1], {"constraint": Constraint("regex", "a"), "ignore_eos": True}, ["ignore_eos", "end-of-text"]),
        ([1], {"constraint": Constraint("regex", "a" * 65537)}, ["65537 characters", "65536"]),
        ([1], {"top_k": -1}, ["top_k is -1", "at least 0"]),
        ([1], {"seed": 2**64}, [f"seed is {2**64}"]),
        ([1], {"stop_token_ids": (3, 100)}, ["stop_token_ids entry 100", "0 to 99"]),
        ([1], {"stop_token_ids": (3,) * 1025}, ["1025 entries", "1024"]),
        ([1], {"stop_token_ids": (0, 1, *range(3, 100)), "min_tokens": 1}, ["min_tokens is 1", "fewer stop_token_ids"]),
        ([1], {"stop_token_ids": tuple(range(100)), "min_tokens": 2, "ignore_eos": True}, ["min_tokens is 2"]),
    ],
)
def test_a_value_out_of_range_is_refused_with_what_was_found(
    prompt: list[int], sampling: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(GenerateRequest("r", prompt, SamplingParams(**sampling)), LIMITS)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("limits", "setting"),
    [
        (Limits(max_model_len=32, kv_cache_tokens=64, vocab_size=100), "max_model_len"),
        (Limits(max_model_len=64, kv_cache_tokens=32, vocab_size=100), "kv_cache_tokens"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_with_both_numbers(limits: Limits, setting: str) -> None:
    check(GenerateRequest("r", [1] * 12, SamplingParams(max_tokens=20)), limits)
    with pytest.raises(InvalidRequest) as caught:
        check(GenerateRequest("r", [1] * 12, SamplingParams(max_tokens=21)), limits)
    for word in ("12 tokens", "max_tokens 21", "33", "holds 32", setting):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("output", "sampling", "reason"),
    [
        ([9], {"max_tokens": 3}, None),
        ([9, 9, 9], {"max_tokens": 3}, "length"),
        ([9, 2], {"max_tokens": 3}, "stop"),
        ([9, 9, 2], {"max_tokens": 3}, "stop"),
        ([2], {"max_tokens": 3, "ignore_eos": True}, None),
        ([9, 9, 2], {"max_tokens": 3, "ignore_eos": True}, "length"),
        ([9, 4], {"max_tokens": 3, "stop_token_ids": (4,)}, "stop"),
        ([4], {"max_tokens": 3, "stop_token_ids": (4,), "ignore_eos": True}, "stop"),
        ([2], {"max_tokens": 3, "stop_token_ids": (2,), "ignore_eos": True}, "stop"),
        ([4, 9], {"max_tokens": 3, "stop_token_ids": (4,)}, None),
    ],
)
def test_an_answer_ends_by_its_last_token_or_its_length(
    output: list[int], sampling: dict[str, object], reason: str | None
) -> None:
    assert make_request(output, **sampling).finish_reason(EOS) == reason


def test_a_row_samples_when_it_reaches_the_last_known_token() -> None:
    request = make_request([9], max_tokens=3)
    request.adapter = AdapterRef("a", 7)
    request.num_computed = 1
    assert request.num_uncomputed == 3
    assert request.num_tokens_left == 5
    assert not ScheduledRow(request, 2).samples
    assert ScheduledRow(request, 3).samples
    assert ScheduledRow(request, 3).adapter == AdapterRef("a", 7)
    assert ScheduledBatch([ScheduledRow(request, 3), ScheduledRow(request, 2)]).num_tokens == 5
