"""Decoding sequences attend to strips: the same answers as from gathered pages, whatever comes, goes and is reused."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import lora_core.engine.strips
from lora_core.engine import kv_cache
from lora_core.engine.attention import AttentionMetadata, SequenceSpan, attend, build_attention, write_kv
from lora_core.engine.blocks import BlockPool
from lora_core.engine.kv_cache import KVCache, KVLayout
from lora_core.engine.strips import Strips
from tests.engine.answers import (
    NUM_TOKENS,
    PROMPTS,
    Answer,
    Answers,
    Names,
    ask,
    assert_nothing_left,
    finish,
    make_engine,
    peft_answers,
    step,
)
from tests.engine.driver import PROMPT, Driver
from tests.factories import reference_tokens, tiny_model

CPU = torch.device("cpu")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 8
LONGEST = 60


@pytest.fixture(autouse=True)
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of about eight tokens, which every step attends to."""
    monkeypatch.setattr(kv_cache, "STRIP_TOKENS", 8)
    monkeypatch.setattr(lora_core.engine.strips, "LEAST_TOKENS", 0)
    monkeypatch.setattr(lora_core.engine.strips, "LEAST_LENGTH", 0)


class Text:
    """A sequence: random keys, values and queries for each of its tokens, and how many are in the cache."""

    def __init__(self, generator: torch.Generator, shared: "Text | None", num_shared: int) -> None:
        self.keys, self.values = torch.randn(2, LONGEST, NUM_KV_HEADS, HEAD_DIM, generator=generator)
        self.queries = torch.randn(LONGEST, NUM_HEADS, HEAD_DIM, generator=generator)
        if shared is not None:
            self.keys[:num_shared], self.values[:num_shared] = shared.keys[:num_shared], shared.values[:num_shared]
        self.block_table: list[int] = []
        self.num_computed = 0

    def expected(self, start: int, stop: int, window: int | None, softcap: float | None) -> Tensor:
        """Attention of tokens `start:stop` in fp64, `[stop - start, NUM_HEADS * HEAD_DIM]`."""
        group = NUM_HEADS // NUM_KV_HEADS
        keys, values = (heads[:stop].double().repeat_interleave(group, 1) for heads in (self.keys, self.values))
        scores = torch.einsum("qhd,khd->hqk", self.queries[start:stop].double(), keys)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        queried, positions = torch.arange(start, stop)[:, None], torch.arange(stop)
        excluded = positions > queried
        if window is not None:
            excluded |= queried - positions >= window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(excluded, -torch.inf).softmax(-1), values).flatten(1)


class Traffic:
    """Sequences that share a cache with strips; a step is compared with softmax attention, and both with each other."""

    def __init__(self, *, block_size: int, num_strips: int, windows: tuple[int | None, ...], softcap: float | None):
        self.layout = KVLayout(
            num_blocks=400 // block_size,
            num_kv_heads=NUM_KV_HEADS,
            block_size=block_size,
            head_dim=HEAD_DIM,
            num_strips=num_strips,
        )
        self.pool = BlockPool(self.layout.num_blocks, block_size)
        self.cache = KVCache(self.layout, 1, dtype=torch.float32, device=CPU)
        # What a last owner may have left.
        self.cache.layers[0].fill_(float("nan"))
        self.strips = Strips(self.layout)
        self.windows, self.softcap = windows, softcap
        self.generator = torch.Generator().manual_seed(0)
        self.texts: list[Text] = []

    def add(self, shared: Text | None = None) -> Text:
        """A new sequence; it may begin with the full blocks of another."""
        num_blocks = 0 if shared is None else min(shared.num_computed, LONGEST - 8) // self.layout.block_size
        text = Text(self.generator, shared, num_blocks * self.layout.block_size)
        if shared is not None:
            self.take(text, shared.block_table[:num_blocks])
        self.texts.append(text)
        return text

    def take(self, text: Text, blocks: list[int]) -> None:
        """Let a sequence start behind blocks that are in use."""
        self.pool.share(blocks)
        text.block_table += blocks
        text.num_computed = len(blocks) * self.layout.block_size

    def end(self, text: Text) -> None:
        self.pool.free(text.block_table)
        text.num_computed = 0

    def step(self, work: list[tuple[Text, int]]) -> AttentionMetadata:
        """Compute the next tokens of sequences, and check what they attend to."""
        spans, ends = [], []
        for text, count in work:
            ends.append(text.num_computed + count)
            text.block_table += self.pool.allocate(self.pool.blocks_for(ends[-1]) - len(text.block_table))
            spans.append(SequenceSpan(count, ends[-1], text.block_table))
        attention = build_attention(
            spans, self.layout, windows=self.windows, dtype=torch.float32, device=CPU, num_heads=NUM_HEADS,
            strips=self.strips,
        )  # fmt: skip
        if attention.fresh_blocks is not None:
            self.cache.clear(attention.fresh_blocks)
        if attention.strip_fill is not None:
            self.cache.fill_strips(attention.strip_fill)
        parts = [(text, slice(end - count, end)) for (text, count), end in zip(work, ends, strict=True)]
        queries = torch.cat([text.queries[rows] for text, rows in parts])
        key_values = torch.cat([torch.cat((text.keys[rows], text.values[rows]), 1) for text, rows in parts])
        write_kv(self.cache.layers[0], key_values, attention)
        for window in self.windows:
            attended = attend(
                queries, key_values, self.cache.layers[0], attention, scale=1.0, window=window, softcap=self.softcap
            )
            expected = torch.cat([text.expected(r.start, r.stop, window, self.softcap) for text, r in parts])
            torch.testing.assert_close(attended.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        for (text, _), end in zip(work, ends, strict=True):
            text.num_computed = end
        self.strips.check(self.cache)
        return attention


def test_a_sequence_is_copied_once_and_each_of_its_tokens_is_added() -> None:
    traffic = Traffic(block_size=4, num_strips=20, windows=(None,), softcap=None)
    text, other = traffic.add(), traffic.add()
    assert traffic.step([(text, 20), (other, 3)]).strip_fill is None
    fill = traffic.step([(text, 1), (other, 1)]).strip_fill
    assert fill is not None
    assert fill.sources is not None
    assert len(fill.sources) == 2 * NUM_KV_HEADS * (5 + 1), "blocks of 20 and of 3 tokens"
    for _ in range(3):
        attention = traffic.step([(text, 1), (other, 1)])
        assert attention.strip_fill is None
        assert not attention.reads[None].decodes, "nothing is gathered"
    # A new strip is only cleared.
    fill = traffic.step([(text, 1), (other, 4)]).strip_fill
    assert fill is not None
    assert fill.sources is None
    fill = traffic.step([(text, 1), (other, 1)]).strip_fill
    assert fill is not None
    assert fill.sources is not None
    assert len(fill.sources) == 2 * NUM_KV_HEADS * 2, "of the other one what came behind the copy"


def test_few_or_short_sequences_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_core.engine.strips, "LEAST_TOKENS", 60)
    monkeypatch.setattr(lora_core.engine.strips, "LEAST_LENGTH", 20)
    traffic = Traffic(block_size=4, num_strips=40, windows=(None,), softcap=None)
    long, *short = (traffic.add() for _ in range(4))
    traffic.step([(long, 40), *[(text, 8) for text in short]])
    assert traffic.step([(long, 1), (short[0], 1)]).reads[None].strips is None, "50 tokens"
    assert traffic.step([(long, 1), *[(text, 1) for text in short]]).reads[None].strips is None, "70, 17 on average"
    traffic.step([(text, 9) for text in short])
    assert traffic.step([(long, 1), *[(text, 1) for text in short]]).reads[None].strips is not None
    assert traffic.step([(long, 1)]).reads[None].strips is None


@pytest.mark.parametrize("all_at_once", [True, False])
def test_strips_of_sequences_that_ended_are_free(all_at_once: bool) -> None:
    traffic = Traffic(block_size=4, num_strips=20, windows=(None,), softcap=None)
    texts = [traffic.add() for _ in range(5)]
    traffic.step([(text, 17) for text in texts])
    traffic.step([(text, 1) for text in texts])
    assert traffic.strips.num_free == 5
    for text in texts[:4]:
        traffic.end(text)
        if not all_at_once:
            traffic.step([(texts[4], 1)])
    traffic.step([(texts[4], 1)])
    assert traffic.strips.num_free == 17


def test_far_strips_move_into_gaps() -> None:
    """Only strips near the first are multiplied, or one late sequence would cost as much as all before it."""
    traffic = Traffic(block_size=4, num_strips=40, windows=(None,), softcap=None)
    texts = [traffic.add() for _ in range(12)]
    traffic.step([(text, 17) for text in texts])
    strips = traffic.step([(text, 1) for text in texts]).reads[None].strips
    assert strips is not None
    assert strips.extent == 36
    for text in texts[:-1]:
        traffic.end(text)
    strips = traffic.step([(texts[-1], 1)]).reads[None].strips
    assert strips is not None
    assert strips.extent == 3


def test_without_room_for_all_the_others_gather() -> None:
    traffic = Traffic(block_size=4, num_strips=5, windows=(None,), softcap=None)
    texts = [traffic.add() for _ in range(4)]
    traffic.step([(text, 12) for text in texts])
    # From the 17th token on a sequence needs a third strip, and one of the two has to give its own back.
    for num_in_strips in (2, 2, 2, 2, 1, 1):
        reads = traffic.step([(text, 1) for text in texts]).reads[None]
        assert reads.strips is not None
        assert reads.strips.rows is not None
        assert len(reads.strips.rows) == num_in_strips
        assert sum(len(group.rows) for group in reads.decodes if group.rows is not None) == 4 - num_in_strips


def test_a_sequence_that_starts_again_gives_back_what_it_no_longer_needs_before_others_take_it() -> None:
    """Preempted and started again between two steps, it still has the strips of its longer self."""
    traffic = Traffic(block_size=4, num_strips=6, windows=(None,), softcap=None)
    first, second = traffic.add(), traffic.add()
    traffic.step([(first, 9), (second, 30)])
    traffic.step([(first, 1), (second, 1)])
    traffic.end(second)
    second.block_table += traffic.pool.allocate(1)
    traffic.step([(first, 22)])
    strips = traffic.step([(second, 1), (first, 1)]).reads[None].strips
    assert strips is not None
    assert strips.rows is None


def test_a_sequence_that_starts_again_in_blocks_of_other_content_is_copied_anew() -> None:
    """Between two steps its list came to name blocks that another sequence wrote; behind them there was a NaN."""
    traffic = Traffic(block_size=4, num_strips=9, windows=(None,), softcap=None)
    text, other = traffic.add(), traffic.add()
    text.values[10:] = float("nan")
    traffic.step([(text, 14), (other, 9)])
    traffic.step([(text, 1), (other, 1)])
    traffic.end(text)
    text.keys, text.values = other.keys.clone(), other.values.clone()
    traffic.take(text, other.block_table[:2])
    traffic.step([(text, 1), (other, 1)])
    traffic.step([(text, 1), (other, 1)])


def test_tokens_that_are_computed_anew_are_copied_anew() -> None:
    traffic = Traffic(block_size=16, num_strips=9, windows=(None,), softcap=None)
    text = traffic.add()
    traffic.step([(text, 9)])
    for _ in range(4):
        traffic.step([(text, 1)])
    text.num_computed -= 3
    text.keys[text.num_computed :] += 1
    traffic.step([(text, 3)])
    traffic.step([(text, 1)])


def test_sequences_of_very_different_lengths_are_padded_apart() -> None:
    traffic = Traffic(block_size=1, num_strips=60, windows=(None,), softcap=None)
    texts = [traffic.add() for _ in range(10)]
    traffic.step([(texts[0], 57), *[(text, 2) for text in texts[1:]]])
    reads = traffic.step([(text, 1) for text in texts]).reads[None]
    assert reads.strips is not None
    assert [len(group.mask) for group in reads.strips.groups] == [1, 9]


def test_a_nan_is_its_own_sequences_alone() -> None:
    """Also that of a sequence that has ended, in strips that are multiplied along or have another owner."""
    traffic = Traffic(block_size=4, num_strips=12, windows=(None,), softcap=None)
    good, bad, short = traffic.add(), traffic.add(), traffic.add()
    bad.keys[3:] = bad.values[3:] = float("nan")
    traffic.step([(bad, 30), (good, 21), (short, 2)])
    for _ in range(3):
        traffic.step([(bad, 1), (good, 1), (short, 1)])
    for _ in range(3):
        traffic.step([(good, 1), (short, 1)])
    traffic.end(bad)
    late = traffic.add()
    traffic.step([(late, 9), (good, 1)])
    for _ in range(3):
        traffic.step([(good, 1), (late, 1), (short, 1)])


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 20)),
    st.tuples(st.just("share"), st.integers(1, 20)),
    st.tuples(st.just("restart"), st.integers(0, 30)),
    st.tuples(st.just("end"), st.integers(0, 30)),
    st.tuples(st.just("repeat"), st.integers(0, 30)),
    st.tuples(st.just("decode"), st.integers(1, 20)),
    st.tuples(st.just("decode some"), st.integers(1, 5)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(ACTIONS, min_size=5, max_size=30),
    block_size=st.sampled_from([1, 3, 4, 16]),
    num_strips=st.sampled_from([1, 6, 60]),
    windows=st.sampled_from([(None,), (None, 5), (7,), (30, None)]),
    softcap=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 1000),
)
def test_any_traffic_equals_softmax_attention(actions: list[tuple[str, int]], seed: int, **options: Any) -> None:
    traffic, chance = Traffic(**options), random.Random(seed)
    for action, number in actions:
        running = [text for text in traffic.texts if text.block_table and text.num_computed < LONGEST - 1]
        if action == "add" or not running:
            if len(running) < 6:
                traffic.step([(traffic.add(), max(1, number))])
        elif action == "share" and len(running) < 6:
            text = traffic.add(running[number % len(running)])
            count = min(number, LONGEST - text.num_computed)
            traffic.step([(text, count), *[(text, 1) for text in running]])
        elif action == "end":
            traffic.end(running[number % len(running)])
        elif action == "restart":
            # Preempted, it computes its text anew but for what it finds, before any step runs without it.
            text = running[number % len(running)]
            end, kept = (
                text.num_computed,
                text.block_table[: chance.choice([0, text.num_computed]) // options["block_size"]],
            )
            traffic.pool.share(kept)
            traffic.end(text)
            text.block_table += kept
            text.num_computed = len(kept) * options["block_size"]
            while text.num_computed < end:
                count = min(chance.randint(1, 9), end - text.num_computed)
                others = [(other, 1) for other in running if other is not text and other.num_computed < LONGEST - 1]
                traffic.step([*others, (text, count)] if chance.random() < 0.5 else [(text, count)])
        elif action == "repeat":
            # The same token again, as where its successor could not be chosen.
            text = running[number % len(running)]
            traffic.step([(text, 1)])
            text.num_computed -= 1
        else:
            for _ in range(number):
                chosen = running if action == "decode" else chance.sample(running, chance.randint(1, len(running)))
                work = [(text, 1) for text in chosen if text.num_computed < LONGEST - 1]
                if work:
                    traffic.step(work)


@pytest.mark.parametrize("chunk", [1000, 4], ids=["whole prompts", "prompts in chunks"])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_greedy_tokens_are_those_of_transformers(architecture: str, chunk: int, tmp_path: Path) -> None:
    """Gemma 2: every other layer has a window of 20 tokens, and scores are soft-capped."""
    base = tiny_model(tmp_path, architecture)
    driver = Driver(base)
    prompts = [PROMPT, PROMPT[:1], [*PROMPT, *PROMPT[::-1], 9]]
    requests = [driver.request(prompt) for prompt in prompts]
    driver.finish(requests, 10, chunk=chunk)
    driver.runner.check()
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.token_ids[len(prompt) :] == reference_tokens(base, None, prompt, 10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_base_rows_are_bit_identical_with_lora_on_and_off(
    dtype: str, tiny_base: Path, tiny_adapters: dict[str, Path]
) -> None:
    on, off = Driver(tiny_base, tiny_adapters, dtype=dtype), Driver(tiny_base, dtype=dtype)
    neighbours = [on.request(PROMPT, name) for name in tiny_adapters]
    plain_neighbours = [off.request(PROMPT) for _ in tiny_adapters]
    request, plain = on.request(PROMPT[:6]), off.request(PROMPT[:6])
    for _ in range(8):
        logits_on = on.step([(r, r.num_uncomputed) for r in (*neighbours, request)])
        logits_off = off.step([(r, r.num_uncomputed) for r in (*plain_neighbours, plain)])
        assert torch.equal(logits_on[id(request)], logits_off[id(plain)])


NAMES = (None, "attention-r2", "linear-r4", "rslora-r8")
REQUESTS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(NAMES), st.sampled_from(sorted(PROMPTS)), st.integers(1, NUM_TOKENS)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 8)),
)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(REQUESTS, min_size=5, max_size=40),
    block_size=st.sampled_from([1, 4, 16]),
    kv_cache_tokens=st.sampled_from([48, 96, 400]),
    strip_tokens=st.sampled_from([None, 24, 0]),
    max_num_batched_tokens=st.sampled_from([3, 8, 40]),
    max_slot_wait_s=st.sampled_from([0.0, 10.0]),
    max_loras_per_step=st.sampled_from([None, 1]),
)
def test_any_traffic_answers_exactly(
    tiny_base: Path, tiny_adapters: Names, reference: Any, actions: list[tuple[Any, ...]], **settings: Any
) -> None:
    """Preempted and put-back requests, shared and reused blocks, aborts: `check_invariants` compares every copy."""
    engine = make_engine(tiny_base, tiny_adapters, slots=2, **settings)
    answers: Answers = {}
    expected: dict[str, list[int]] = {}
    for place, (action, *values) in enumerate(actions):
        if action == "add":
            name, size, max_tokens = values
            expected[str(place)] = reference(name, size)[:max_tokens]
            ask(engine, str(place), name, size, max_tokens)
        elif action == "step":
            for _ in range(values[0]):
                step(engine, answers)
        elif expected:
            request_id = list(expected)[values[0] % len(expected)]
            if answers.get(request_id, Answer()).reason is None:
                engine.abort(request_id)
                del expected[request_id]
                answers.pop(request_id, None)
    finish(engine, answers)
    assert answers == {request_id: Answer(tokens, "length") for request_id, tokens in expected.items()}
    assert_nothing_left(engine)


@pytest.fixture(scope="module")
def reference(tiny_base: Path, tiny_adapters: Names) -> Any:
    """The answer of PEFT (or of transformers for None) to one of PROMPTS."""
    return peft_answers(tiny_base, tiny_adapters)
