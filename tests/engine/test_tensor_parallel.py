"""A model on several ranks, each a process: every answer is that of one device, through every kind of adapter."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_core.engine.engine import LLMEngine
from lora_core.types import LoRAStatus
from tests.engine.answers import (
    NUM_TOKENS,
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
from tests.engine.test_adapter_kinds import KINDS
from tests.factories import make_adapter, reference_tokens, tiny_llama

pytestmark = pytest.mark.filterwarnings(
    # Of a head adapted apart from the embedding it is tied to.
    "ignore:Model with `tie_word_embeddings=True`",
    "ignore:Model has `tie_word_embeddings=True`",
)

Reference = Callable[[str | None, int], list[int]]

BASES: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    # Logits that do not divide: the ranks have 65 and 66 of them.
    "untied with biases": {"tied": False, "attention_bias": True, "mlp_bias": True, "vocab": 131},
}


@pytest.mark.parametrize(("kind", "pack"), [("tied", True), ("untied with biases", False)])
def test_a_mixed_batch_of_all_kinds_equals_peft(tmp_path: Path, kind: str, pack: bool) -> None:
    base = tiny_llama(tmp_path / "base", seed=7, **BASES[kind])
    folders = {name: make_adapter(base, tmp_path / name, seed=9, **made) for name, made in KINDS.items()}
    driver = Driver(base, folders, tensor_parallel_size=2, pack_weights=pack)
    work = [(name, PROMPT[: 3 + place]) for place, name in enumerate([None, *folders, None])]
    whole, in_chunks = ([driver.request(prompt, name) for name, prompt in work] for _ in range(2))
    driver.finish(whole, 12)
    driver.finish(in_chunks, 12, chunk=4)
    driver.runner.close()
    for one, other, (name, prompt) in zip(whole, in_chunks, work, strict=True):
        expected = reference_tokens(base, None if name is None else folders[name], prompt, 12)
        assert one.token_ids[len(prompt) :] == other.token_ids[len(prompt) :] == expected, name


@pytest.fixture(scope="module")
def adapters(tiny_base: Path, tiny_adapters: Names, tmp_path_factory: pytest.TempPathFactory) -> Names:
    """Those of the base, and two more that take turns under one name."""
    folder = tmp_path_factory.mktemp("turns")
    dora: dict[str, Any] = {"targets": ("q_proj", "o_proj", "down_proj", "up_proj"), "use_dora": True}
    return {
        **tiny_adapters,
        "turn 0": make_adapter(tiny_base, folder / "0", r=3, seed=21),
        "turn 1": make_adapter(tiny_base, folder / "1", r=6, seed=22, **dora),
    }


@pytest.fixture(scope="module")
def reference(tiny_base: Path, adapters: Names) -> Reference:
    """The answer of PEFT (or of transformers for None) to one of PROMPTS."""
    return peft_answers(tiny_base, adapters)


@pytest.fixture(scope="module")
def engine(tiny_base: Path) -> Iterator[LLMEngine]:
    """Two slots, and so little room that requests are preempted."""
    engine = make_engine(
        tiny_base,
        {},
        slots=2,
        tensor_parallel_size=2,
        block_size=4,
        kv_cache_tokens=96,
        max_num_batched_tokens=11,
        max_num_seqs=6,
        max_slot_wait_s=0.02,
    )
    engine.warm_up()
    yield engine
    engine.close()


NAMES = [None, "attention-r2", "linear-r4", "query-value-r8", "rslora-r8", "turns"]
ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(NAMES), st.sampled_from([1, 3, 12, 33]), st.integers(1, NUM_TOKENS)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 3)),
    st.tuples(st.just("reload")),
)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(ACTIONS, min_size=5, max_size=40))
def test_five_adapters_on_two_slots_answer_exactly_under_any_traffic(
    engine: LLMEngine, adapters: Names, reference: Reference, actions: list[tuple[Any, ...]]
) -> None:
    """Prefix hits, preemption, aborts, slots that change hands, and a name that is reloaded with other content."""
    turn = 0
    for name in NAMES[1:-1]:
        assert engine.manager.load_adapter(f"{name}={adapters[str(name)]}").status is LoRAStatus.SUCCESS
    assert engine.manager.load_adapter(f"turns={adapters['turn 0']}").status is LoRAStatus.SUCCESS
    answers: Answers = {}
    expected: dict[str, list[int]] = {}
    for place, (action, *values) in enumerate(actions):
        match action:
            case "add":
                name, size, max_tokens = values
                ask(engine, str(place), name, size, max_tokens)
                content = f"turn {turn}" if name == "turns" else name
                expected[str(place)] = reference(content, size)[:max_tokens]
            case "step":
                for _ in range(values[0]):
                    step(engine, answers)
            case "reload":
                turn = 1 - turn
                loaded = engine.manager.load_adapter(f"turns={adapters[f'turn {turn}']}", replace=True)
                assert loaded.status is LoRAStatus.SUCCESS, loaded.message
            case "abort" if expected:
                request_id = list(expected)[values[0] % len(expected)]
                if answers.get(request_id, Answer()).reason is None:
                    engine.abort(request_id)
                    del expected[request_id]
                    answers.pop(request_id, None)
    finish(engine, answers)
    assert answers == {request_id: Answer(tokens, "length") for request_id, tokens in expected.items()}
    assert_nothing_left(engine)


def test_logprobs_and_seeds_are_those_of_one_device(tiny_base: Path, engine: LLMEngine) -> None:
    """Sampling is the first rank's alone, from all ranks' logits; prompts are scored from them as well."""
    one = make_engine(tiny_base, {}, slots=2, block_size=4, kv_cache_tokens=96)
    found = []
    for each in (engine, one):
        for index in range(3):
            ask(each, str(index), None, 12, temperature=0.8, seed=index, logprobs=3, prompt_logprobs=2)
        deltas = []
        while each.has_work():
            deltas += each.step()
        found.append(sorted(deltas, key=lambda delta: delta.request_id))
    shared, alone = found
    assert [delta.token_ids for delta in shared] == [delta.token_ids for delta in alone]
    for one_shared, one_alone in zip(shared, alone, strict=True):
        for kind in ("logprobs", "prompt_logprobs"):
            scores = [getattr(delta, kind) or [] for delta in (one_shared, one_alone)]
            assert [score.top_ids for score in scores[0]] == [score.top_ids for score in scores[1]]
            assert [score.logprob for score in scores[0]] == pytest.approx([score.logprob for score in scores[1]], 1e-4)
