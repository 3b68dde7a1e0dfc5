"""Log-probabilities on their way: nothing where nobody asks, offsets in characters, texts of parts of characters."""

import itertools
import pickle
from collections.abc import Iterator

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from deployments.choice_seeds import choice_seed
from deployments.generation import GenerateCall, GenerateChunk, ScoredToken
from deployments.token_scores import TextOffsets, chat_logprobs, completion_logprobs, prompt_logprobs
from lora_core.messages import Constraint, GenerateRequest, SamplingParams, TokenDelta, TokenLogprobs


def scored(data: bytes, logprob: float | None = -1.0, *top: ScoredToken, special: bool = False) -> ScoredToken:
    return ScoredToken(len(data), data, logprob, list(top), special)


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(places):
        yield data[start:end]


def test_a_delta_without_logprobs_is_not_a_byte_longer() -> None:
    assert msgspec.json.decode(msgspec.json.encode(TokenDelta("r", [5]))) == {"request_id": "r", "token_ids": [5]}
    assert msgspec.json.encode(SamplingParams()) == b"{}"


def test_messages_come_through_as_they_were() -> None:
    sampling = SamplingParams(logit_bias=((5, 1.5),), constraint=Constraint("regex", "a"), prompt_logprobs=0)
    request = GenerateRequest("r", [1], sampling)
    delta = TokenDelta("r", [5], logprobs=[TokenLogprobs(-0.5, [5, 6], [-0.5, -1.5])], prompt_logprobs=[])
    for message in (request, delta):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message


def test_what_travels_between_actors_can_be_pickled() -> None:
    sampling = SamplingParams(logit_bias=((5, 1.5),), constraint=Constraint("regex", "a"))
    call = GenerateCall(request_id="r", prompt="x", sampling=sampling, n=3, echo=True)
    chunk = GenerateChunk(text="a", token_ids=[1], index=2, scores=[scored(b"a", -1.0, scored(b"b"))])
    for message in (call, chunk):
        assert pickle.loads(pickle.dumps(message)) == message


@given(st.text(max_size=20), st.lists(st.integers(0, 100), max_size=8))
def test_offsets_are_those_of_the_characters_tokens_start_in(text: str, cuts: list[int]) -> None:
    data, offsets = text.encode(errors="replace"), TextOffsets()
    text, start = data.decode(), 0
    for piece in pieces(data, cuts):
        before = data[:start].decode(errors="ignore")
        assert offsets.take(scored(piece)) == len(before)
        start += len(piece)


def test_offsets_after_broken_characters_and_special_tokens() -> None:
    offsets = TextOffsets()
    tokens = [scored(b"\xc3"), scored(b"w"), scored(b"<end>", special=True), scored(b"x")]
    # Written as a replacement character, "w" and "x".
    assert [offsets.take(token) for token in tokens] == [0, 1, 2, 2]


def test_parts_of_characters_are_written_as_openai_writes_them() -> None:
    part = scored(b"\xe4\xbd", -0.25, scored(b"\xe4\xbd", -0.25), scored(b"a", -2.0))
    (chat,) = chat_logprobs([part])["content"]
    assert (chat["token"], chat["bytes"], chat["logprob"]) == (r"\xe4\xbd", [0xE4, 0xBD], -0.25)
    assert [top["token"] for top in chat["top_logprobs"]] == [r"\xe4\xbd", "a"]
    completion = completion_logprobs([part], 2, TextOffsets())
    assert completion["tokens"] == [r"bytes:\xe4\xbd"]
    assert completion["top_logprobs"] == [{r"bytes:\xe4\xbd": -0.25, "a": -2.0}]


@pytest.mark.parametrize(("num_top", "expected"), [(0, None), (1, [{"b": -0.1, "a": -3.0}])])
def test_the_token_that_is_there_is_told_with_the_likeliest(num_top: int, expected: object) -> None:
    token = scored(b"a", -3.0, scored(b"b", -0.1), scored(b"c", -2.0))
    assert completion_logprobs([token], num_top, TextOffsets())["top_logprobs"] == expected


def test_prompts_begin_with_a_token_that_follows_nothing() -> None:
    first, second = scored(b"a", None), scored(b"bc", -3.0, scored(b"d", -0.1), scored(b"efg", -4.0))
    assert completion_logprobs([first], 1, TextOffsets())["top_logprobs"] == [None]
    assert prompt_logprobs([first, second], 1) == [
        None,
        {"2": {"logprob": -3.0, "decoded_token": "bc"}, "1": {"logprob": -0.1, "decoded_token": "d"}},
    ]


def test_seeds_of_choices_are_their_own() -> None:
    seeds = [choice_seed(seed, index) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for index in range(20)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**64 for seed in seeds)
    assert choice_seed(7, 0) == 7
    # The same in every process.
    assert choice_seed(7, 1) == 4595731978703777594
