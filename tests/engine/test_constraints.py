"""Constrained answers of a model that writes garbage: they fit, they end, and nobody else notices."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from transformers import AutoTokenizer

from deployments.sampling_fields import StructuredOutputs
from lora_core.engine.constraint import ConstraintState
from lora_core.engine.engine import LLMEngine
from lora_core.engine.grammar_trial import GrammarTrial
from lora_core.messages import Constraint, GenerateRequest, SamplingParams
from tests.engine.answers import PROMPTS, Answer, Answers, ask, assert_nothing_left, finish, make_engine, step
from tests.engine.byte_model import END, byte_model
from tests.factories import make_adapter

Text = Annotated[str, Field(max_length=6)]


class Point(BaseModel, extra="forbid"):
    x: Annotated[int, Field(ge=-50, le=50)]
    y: Annotated[int, Field(ge=0, le=9)]


class Person(BaseModel, extra="forbid"):
    name: Text
    age: Annotated[int, Field(ge=0, le=120)]
    kind: Literal["pirate", "sailor", "Käpt'n"]
    tags: Annotated[list[Text], Field(max_length=3)]


class Tree(BaseModel, extra="forbid"):
    value: bool | None
    place: Point | Literal["nowhere"]
    path: Annotated[list[Point], Field(min_length=1, max_length=2)]


MODELS = (Point, Person, Tree)
AMBIGUOUS = json.dumps(
    {
        "$defs": {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}] * 300}},
        "$ref": "#/$defs/a",
    }
)
"""Each bracket multiplies the ways in which it can be read."""


ENDLESS = [{"type": "string", "pattern": f"a.{{{length}}}b"} for length in range(40)]
"""What fits all of these takes more memory to find than there is."""

SLOW = [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnop"]
"""What fits all of these takes a second to be found too hard."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def decode(base: Path) -> Callable[[Answer], str]:
    tokenizer = AutoTokenizer.from_pretrained(base)

    def text(answer: Answer) -> str:
        assert answer.tokens[-1] == END
        assert END not in answer.tokens[:-1]
        return str(tokenizer.decode(answer.tokens[:-1]))

    return text


@pytest.fixture(scope="module")
def shared(base: Path) -> Iterator[LLMEngine]:
    engine = make_engine(base, {}, slots=0)
    yield engine
    assert_nothing_left(engine)


def schema_of(model: type[BaseModel]) -> Constraint:
    return Constraint("json_schema", json.dumps(model.model_json_schema()))


@pytest.mark.parametrize("model", MODELS)
def test_answers_to_a_schema_are_valid(
    shared: LLMEngine, decode: Callable[[Answer], str], model: type[BaseModel]
) -> None:
    for index in range(8):
        sampling: dict[str, Any] = {"temperature": 0.0} if index == 0 else {"temperature": 1.5, "seed": index}
        ask(shared, str(index), None, max_tokens=480, constraint=schema_of(model), **sampling)
    answers = finish(shared)
    texts = [decode(answer) for answer in answers.values()]
    for text in texts:
        model.model_validate_json(text, strict=True)
    assert {answer.reason for answer in answers.values()} == {"stop"}
    assert len(set(texts)) > 4


@pytest.mark.parametrize(
    "pattern", ["(red|green)", r"[a-f]{3,10}@[0-9]{2}\.com", "ä{5}", r"\d{4}/\w-\d\d", "(?i:YES|no)?", "a\nb"]
)
def test_answers_to_an_expression_match_it(shared: LLMEngine, decode: Callable[[Answer], str], pattern: str) -> None:
    for seed in range(5):
        ask(shared, str(seed), None, max_tokens=60, temperature=2.0, seed=seed, constraint=Constraint("regex", pattern))
    for answer in finish(shared).values():
        assert re.fullmatch(pattern, decode(answer))


def test_choices_may_be_any_text(shared: LLMEngine, decode: Callable[[Answer], str]) -> None:
    choices = ["a b-c", "x<y>/%", 'new\nline\t"q"', r"\d[x]\/", "~&#😀", " "]
    constraint = StructuredOutputs.model_validate({"choice": choices}).constraint()
    for seed in range(30):
        ask(shared, str(seed), None, max_tokens=40, temperature=2.0, seed=seed, constraint=constraint)
    found = {decode(answer) for answer in finish(shared).values()}
    assert found <= set(choices)
    assert len(found) > 2


def test_an_answer_that_is_cut_short_is_the_start_of_a_valid_one(shared: LLMEngine, base: Path) -> None:
    ask(shared, "r", None, max_tokens=5, constraint=schema_of(Person))
    answer = finish(shared)["r"]
    assert answer.reason == "length"
    assert str(AutoTokenizer.from_pretrained(base).decode(answer.tokens)).lstrip()[:1] == "{"


def test_min_tokens_gives_way_where_the_constraint_leaves_only_the_end(
    shared: LLMEngine, decode: Callable[[Answer], str]
) -> None:
    for name, pattern in (("short", "abc"), ("long", "a*")):
        ask(shared, name, None, max_tokens=90, min_tokens=30, constraint=Constraint("regex", pattern))
    answers = finish(shared)
    assert decode(answers["short"]) == "abc"
    assert len(answers["long"].tokens) > 30


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"frequency_penalty": 1.0}])
def test_min_tokens_gives_way_where_the_constraint_leaves_only_stop_tokens(
    shared: LLMEngine, base: Path, temperature: float, sampling: dict[str, Any]
) -> None:
    stops = tuple(AutoTokenizer.from_pretrained(base).encode("ab"))
    ask(
        shared, "r", None, max_tokens=9, min_tokens=4, constraint=Constraint("regex", "[ab]{8}"), logprobs=2,
        stop_token_ids=stops, temperature=temperature, **sampling,
    )  # fmt: skip
    answer = finish(shared)["r"]
    assert answer.reason == "stop"
    assert answer.tokens[0] in stops


@pytest.mark.parametrize(
    ("temperature", "sampling"), [(0.0, {}), (1.0, {}), (1.0, {"top_p": 0.9}), (1e300, {"top_k": 5})]
)
def test_a_text_that_the_vocabulary_cannot_write_ends_its_answer_only(
    tmp_path: Path, temperature: float, sampling: dict[str, Any]
) -> None:
    folder = byte_model(tmp_path)
    # A tokenizer without the letter q.
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["model"]["vocab"]["\u0100\u0100"] = saved["model"]["vocab"].pop("q")
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    engine = make_engine(folder, {}, slots=0)
    asked: dict[str, Any] = {"temperature": temperature, "logprobs": 2, "max_tokens": 6, **sampling}
    ask(engine, "q", None, constraint=Constraint("regex", "abq"), **asked)
    ask(engine, "other", None, ignore_eos=True, **asked)
    answers = finish(engine)
    assert answers["q"].error_type == "InvalidRequest"
    assert "no token" in (answers["q"].error or "")
    assert len(answers["other"].tokens) == 6


CONTRACT = settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
KINDS: tuple[dict[str, Any], ...] = (
    {"constraint": schema_of(Point), "temperature": 1.2, "seed": 5},
    {"constraint": Constraint("regex", "[a-z]{5,20}"), "temperature": 0.9, "seed": 6, "repetition_penalty": 1.4},
    {"constraint": schema_of(Tree), "temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 9, "top_p": 0.8, "min_p": 0.01, "frequency_penalty": 0.5, "ignore_eos": True},
)


@CONTRACT
@given(data=st.data())
def test_answers_are_the_same_alone_and_in_any_batch_with_preemption(
    base: Path, shared: LLMEngine, data: st.DataObject
) -> None:
    expected = []
    for kind in KINDS:
        ask(shared, "r", None, max_tokens=60, **kind)
        expected.append(finish(shared)["r"])
    order = data.draw(st.lists(st.integers(0, len(KINDS) - 1), min_size=2, max_size=8))
    engine = make_engine(
        base, {}, slots=0, kv_cache_tokens=data.draw(st.sampled_from([80, 160, 1024])), block_size=4,
        max_num_batched_tokens=data.draw(st.sampled_from([9, 64])),
    )  # fmt: skip
    answers: Answers = {}
    aborted = data.draw(st.integers(0, len(order) - 1))
    for place, kind_index in enumerate(order):
        ask(engine, str(place), None, max_tokens=60, **KINDS[kind_index])
        for _ in range(data.draw(st.integers(0, 5))):
            step(engine, answers)
    engine.abort(str(aborted))
    engine.check_invariants()
    finish(engine, answers)
    for place, kind_index in enumerate(order):
        if place != aborted:
            assert answers[str(place)] == expected[kind_index]
    assert_nothing_left(engine)


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Constraint("regex", "(a|b"), "regex does not compile"),
        (Constraint("json_schema", "{"), "not a JSON object"),
        (Constraint("json_schema", "[]"), "not a JSON object"),
        (Constraint("json_schema", '{"type": "nonsense"}'), "does not compile.*nonsense"),
        (Constraint("json_schema", '{"$ref": "http://127.0.0.1:9/x"}'), "does not compile"),
        (Constraint("json_schema", '{"$ref": "#"}'), "json_schema|constraint"),
        (Constraint("json_schema", "[" * 5000), "not a JSON object"),
        (Constraint("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000), "json_schema"),
        (Constraint("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}'), "does not compile"),
        (Constraint("regex", "a\\"), "backslash"),
        (Constraint("json_schema", '{"type": "integer", "multipleOf": 99999989}'), "more than 128 MiB|more than 3 s"),
        (Constraint("json_schema", json.dumps({"allOf": ENDLESS})), "more than 128 MiB|more than 3 s"),
    ],
)
def test_a_constraint_that_does_not_compile_is_refused_before_it_takes_a_block(
    shared: LLMEngine, constraint: Constraint, words: str
) -> None:
    ask(shared, "r", None, constraint=constraint)
    answers: Answers = {}
    while shared.has_work():
        assert shared.num_running == 0
        step(shared, answers)
    assert answers["r"].error_type == "InvalidRequest"
    assert re.search(words, answers["r"].error or "")


def test_what_does_not_compile_is_tried_once(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(base, {}, slots=0)
    tried: list[str] = []
    try_out = GrammarTrial.failure

    def noted(trial: GrammarTrial, grammar: str) -> str | None:
        tried.append(grammar)
        return try_out(trial, grammar)

    monkeypatch.setattr(GrammarTrial, "failure", noted)
    for index in range(4):
        ask(engine, f"wrong {index}", None, constraint=Constraint("json_schema", '{"type": "strin"}'))
        ask(engine, f"endless {index}", None, constraint=Constraint("json_schema", json.dumps({"allOf": ENDLESS})))
    answers = finish(engine)
    assert {answer.error_type for answer in answers.values()} == {"InvalidRequest"}
    assert len(answers) == 8
    assert len(tried) == 2


def test_a_trial_that_was_killed_is_started_again(base: Path) -> None:
    others = set(psutil.Process().children())
    engine = make_engine(base, {}, slots=0)
    engine.warm_up()
    (trial,) = set(psutil.Process().children()) - others
    for letter in "ab":
        ask(engine, letter, None, max_tokens=4, constraint=Constraint("regex", letter))
        assert finish(engine)[letter].reason == "stop"
        if letter == "a":
            trial.kill()
            trial.wait()


def test_without_an_end_or_a_tokenizer_no_answer_is_constrained(tiny_base: Path) -> None:
    engine = make_engine(tiny_base, {}, slots=0)
    engine.warm_up()
    ask(engine, "r", None, constraint=Constraint("regex", "a"))
    answer = finish(engine)["r"]
    assert answer.error_type == "InvalidRequest"
    assert "end-of-text" in (answer.error or "")


def test_a_hostile_schema_holds_up_nobody_else(base: Path) -> None:
    engine = make_engine(base, {}, slots=0)
    engine.warm_up()
    for index in range(3):
        ask(engine, str(index), None, max_tokens=400, ignore_eos=True)
    answers: Answers = {}
    for _ in range(20):
        step(engine, answers)
    # The one takes a second to be found too hard, the other one as long for its first token.
    ask(engine, "compile", None, constraint=Constraint("json_schema", json.dumps({"allOf": SLOW})))
    ask(engine, "follow", None, max_tokens=200, constraint=Constraint("json_schema", AMBIGUOUS))
    longest_s, num_steps = 0.0, 0
    while not {"compile", "follow"} <= answers.keys():
        started_s = time.thread_time()
        step(engine, answers)
        longest_s = max(longest_s, time.thread_time() - started_s)
        num_steps += 1
    assert num_steps > 10
    # Where either was done between steps, it would be half a second and more of this thread's time.
    assert longest_s < 0.3
    assert answers["compile"].error_type == answers["follow"].error_type == "InvalidRequest"
    finish(engine, answers)
    assert [len(answers[str(index)].tokens) for index in range(3)] == [400] * 3
    assert_nothing_left(engine)


def pile(engine: LLMEngine, count: int, salt: str) -> None:
    """Ask for answers to distinct schemas, each of which takes long to be refused."""
    for index in range(count):
        schema = json.dumps({"title": f"{salt} {index}", "allOf": SLOW})
        ask_salted(engine, f"{salt} {index}", salt, Constraint("json_schema", schema))


def ask_salted(engine: LLMEngine, request_id: str, salt: str, constraint: Constraint) -> None:
    sampling = SamplingParams(max_tokens=4, temperature=0.0, constraint=constraint)
    engine.add_request(GenerateRequest(request_id, PROMPTS[3], sampling, cache_salt=salt))


def test_a_pile_of_slow_schemas_delays_nobody_elses_by_more_than_one(base: Path) -> None:
    engine = make_engine(base, {}, slots=0)
    engine.warm_up()
    pile(engine, 6, "hostile")
    ask_salted(engine, "other", "modest", Constraint("regex", "b"))
    answers: Answers = {}
    while "other" not in answers or answers["other"].reason is None:
        step(engine, answers)
    assert answers["other"].reason == "stop"
    assert len(answers) <= 3, "FIFO would have had all six refused first"
    # Even of its own it waits for none where the constraint is known.
    ask_salted(engine, "known", "hostile", Constraint("regex", "b"))
    while "known" not in answers or answers["known"].reason is None:
        step(engine, answers)
    assert len(answers) <= 5
    for index in range(6):
        engine.abort(f"hostile {index}")
    assert_nothing_left(engine)


def test_a_constraint_whose_turn_comes_too_late_is_refused_as_such(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_core.engine.compile_turns.LONGEST_QUEUE_S", 0.3)
    engine = make_engine(base, {}, slots=0)
    engine.warm_up()
    pile(engine, 4, "hostile")
    answers = finish(engine)
    assert answers["hostile 0"].error_type == "InvalidRequest"
    late = [answers[f"hostile {index}"] for index in (2, 3)]
    assert {answer.error_type for answer in late} == {"EngineError"}
    assert "send the request again" in str(late[0].error)
    assert_nothing_left(engine)


def test_rows_that_are_late_sit_steps_out_and_answer_as_ever(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[Answers, int]:
        # So few blocks that rows are preempted, too, and computed again in chunks.
        engine = make_engine(base, {}, slots=0, kv_cache_tokens=80, block_size=4, max_num_batched_tokens=9)
        engine.warm_up()
        for index, kind in enumerate(KINDS):
            ask(engine, str(index), None, max_tokens=25, **kind)
        answers: Answers = {}
        num_steps = 0
        while engine.has_work():
            step(engine, answers)
            num_steps += 1
        assert_nothing_left(engine)
        return answers, num_steps

    expected, usual_steps = run()
    follow = ConstraintState.follow

    def slowly(state: ConstraintState, token_id: int | None) -> None:
        time.sleep(0.04)
        follow(state, token_id)

    monkeypatch.setattr(ConstraintState, "follow", slowly)
    monkeypatch.setattr("lora_core.engine.grammars.PATIENCE_S", 0.001)
    answers, num_steps = run()
    assert answers == expected
    assert num_steps > usual_steps + 20


def test_a_constraint_that_takes_too_long_ends_its_answer_only(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_core.engine.constraint.SLOWEST_TOKEN_S", -1.0)
    engine = make_engine(base, {}, slots=0)
    ask(engine, "other", None, max_tokens=40, ignore_eos=True)
    ask(engine, "slow", None, constraint=Constraint("regex", "a+"))
    answers = finish(engine)
    assert answers["slow"].error_type == "InvalidRequest"
    assert "work for one token" in (answers["slow"].error or "")
    assert len(answers["other"].tokens) == 40


def test_requests_that_wait_for_a_compilation_hold_their_adapter_and_no_more(base: Path, tmp_path: Path) -> None:
    """Aborted, refused, or answered: then the adapter is free."""
    adapters = {"mine": make_adapter(base, tmp_path / "mine", seed=3)}
    engine = make_engine(base, adapters)
    for index in range(5):
        ask(engine, str(index), "mine", max_tokens=60, constraint=schema_of(MODELS[index % 3]))
    ask(engine, "refused", "mine", constraint=Constraint("regex", "(a"))
    assert engine.num_waiting == 6
    for index in range(0, 5, 2):
        engine.abort(str(index))
    engine.check_invariants()
    answers = finish(engine)
    assert answers.keys() == {"1", "3", "refused"}
    assert answers["refused"].error_type == "InvalidRequest"
    assert_nothing_left(engine)


def test_a_request_that_still_compiles_ends_with_its_adapters_drain(base: Path, tmp_path: Path) -> None:
    adapters = {"mine": make_adapter(base, tmp_path / "mine", seed=3)}
    engine = make_engine(base, adapters, lora_settings={"drain_timeout_s": 0})
    ask(engine, "r", "mine", constraint=Constraint("json_schema", AMBIGUOUS))
    engine.manager.unload_adapter("mine")
    answer = finish(engine)["r"]
    assert answer.error_type == "AdapterUnloaded"
    engine.check_invariants()
