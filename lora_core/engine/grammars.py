"""`Grammars`: constraints compiled and followed beside the step thread, by llguidance."""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import llguidance.hf
from llguidance import LLMatcher, LLTokenizer, regex_to_lark
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lora_core.engine.compile_turns import CompileTurns
from lora_core.engine.constraint import ConstraintState
from lora_core.engine.grammar_trial import GrammarTrial, parser_limits
from lora_core.errors import InvalidRequest, describe
from lora_core.messages import Constraint

MAX_COMPILED = 64
"""Compiled constraints, or why they cannot be, kept for requests that come with the same ones; the least recently used
goes first."""

WHITESPACE = r"[ \t\n\r]{1,64}"
"""Between the parts of a JSON text: enough for any layout, and models that write nothing else come to an end."""

PATIENCE_S = 0.005
"""How long a step waits for what may come next, when the model has computed its logits before that is known."""


class Grammars:
    """Compiles the constraints of one engine's requests, and follows their answers.

    Both happen on threads of their own, started when they are first needed: llguidance leaves Python to others while it
    works. The step thread alone calls this, and never waits for a compilation. Callers take turns, and a constraint
    that was compiled before waits for no compilation.

    Args:
        model: Folder of the base model, for its tokenizer.
        vocab_size: Of the model's logits.
        eos_token_ids: The tokens that end an answer.
    """

    def __init__(self, model: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._compiling = CompileTurns("grammar-compiler")
        self._starting = CompileTurns("grammar-starter")
        # Of its own: one that is slow to compile must not hold up answers that have begun.
        self._following = ThreadPoolExecutor(1, "grammar-follower")
        self._jobs: set[Future[None]] = set()
        self._tokenizer: LLTokenizer | None = None
        self._trial: GrammarTrial | None = None
        # Each compiled one at its start, not to be changed; seen by the threads that compile and start.
        self._compiled: OrderedDict[Constraint, LLMatcher | InvalidRequest] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self) -> "Future[LLTokenizer | None]":
        """Build the tokenizer, which takes a second, before the first request needs it; None where that fails."""

        def build() -> LLTokenizer | None:
            try:
                tokenizer = self._built_tokenizer()
                self._trial = GrammarTrial()
                return tokenizer
            except Exception:
                # Whoever asks for a constraint is told why.
                return None

        return self._compiling.submit(None, build)

    def compile(self, constraint: Constraint, caller: Hashable = None) -> "Future[ConstraintState]":
        """The state before an answer's first token, when it is ready.

        Args:
            constraint: Whatever a client has sent.
            caller: Whose turn it takes.

        Returns:
            Its exception is InvalidRequest, or EngineError where its turn did not come in time.
        """
        found = self._known(constraint)

        def start() -> ConstraintState:
            try:
                return self._start(self._matcher(constraint) if found is None else found)
            except InvalidRequest:
                raise
            # A panic of the library is no Exception.
            except BaseException as error:
                raise InvalidRequest(f"the {constraint.kind} does not compile: {describe(error)[:500]}") from None

        turns = self._compiling if found is None else self._starting
        return turns.submit(caller, start)

    def follow(self, chosen: Sequence[tuple[ConstraintState, int]]) -> None:
        """Take the tokens that were chosen; the states are ready again some time later."""
        if not chosen:
            return
        for state, _ in chosen:
            state.expect()
        job = self._following.submit(_follow_all, list(chosen))
        self._jobs.add(job)

    def settle(self, states: Sequence[ConstraintState]) -> None:
        """Wait for states to become ready, a few milliseconds at most: those that are not must sit a step out."""
        if not all(state.is_ready for state in states):
            wait(self._jobs, PATIENCE_S)
        done = {job for job in self._jobs if job.done()}
        self._jobs -= done
        for job in done:
            # A fault of ours, if any.
            job.result()

    def _start(self, compiled: LLMatcher | InvalidRequest) -> ConstraintState:
        if isinstance(compiled, InvalidRequest):
            # One for each who raises it.
            raise InvalidRequest(str(compiled))
        state = ConstraintState(compiled.deep_copy(), self._built_tokenizer().vocab_size, self._vocab_size)
        state.follow(None)
        if state.error is not None:
            raise InvalidRequest(state.error)
        return state

    def _known(self, constraint: Constraint) -> LLMatcher | InvalidRequest | None:
        """What came of a compilation before, not to be changed; None if there was none lately."""
        with self._lock:
            found = self._compiled.get(constraint)
            if found is not None:
                self._compiled.move_to_end(constraint)
        return found

    def _matcher(self, constraint: Constraint) -> LLMatcher | InvalidRequest:
        """The same, compiled now where it is not known; for the thread that compiles."""
        found = self._known(constraint)
        if found is None:
            try:
                found = self._compile(constraint)
            except InvalidRequest as error:
                found = error
            with self._lock:
                self._compiled[constraint] = found
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
        return found

    def _compile(self, constraint: Constraint) -> LLMatcher:
        tokenizer, grammar = self._built_tokenizer(), _grammar(constraint)
        if (failure := self._failure(grammar)) is not None:
            raise InvalidRequest(f"the {constraint.kind} does not compile: it {failure}; make it simpler")
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            reason = matcher.get_error().strip()[:500]
            if constraint.kind == "grammar":
                # What follows repeats a grammar that its client has not written.
                reason = reason.partition("\n")[0]
            raise InvalidRequest(f"the {constraint.kind} does not compile: {reason}")
        return matcher

    def _failure(self, grammar: str) -> str | None:
        """Why a grammar must not be compiled in this process, or None."""
        if self._trial is not None:
            try:
                return self._trial.failure(grammar)
            except OSError:
                # Somebody killed it.
                self._trial.close()
        self._trial = GrammarTrial()
        return self._trial.failure(grammar)

    def _built_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = _build_tokenizer(self._model, self._vocab_size, self._eos_token_ids)
        return self._tokenizer


def _build_tokenizer(model: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> LLTokenizer:
    """The base model's tokenizer as llguidance reads it. Raises InvalidRequest where there can be none."""
    if not eos_token_ids:
        raise InvalidRequest("the base model names no end-of-text token, with which constrained answers end")
    if not _has_tokenizer(model):
        raise InvalidRequest("the base model's folder holds no tokenizer, so answers cannot be constrained")
    pretrained = AutoTokenizer.from_pretrained(model, local_files_only=True)
    if not isinstance(pretrained, PreTrainedTokenizerFast):
        raise InvalidRequest(
            f"answers cannot be constrained with the base model's tokenizer, a {type(pretrained).__name__}; save the "
            "model with a tokenizer.json"
        )
    return llguidance.hf.from_tokenizer(pretrained, max(vocab_size, len(pretrained)), sorted(eos_token_ids))


def _has_tokenizer(model: Path) -> bool:
    return any((model / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))


def _grammar(constraint: Constraint) -> str:
    """The constraint in llguidance's own form. Raises InvalidRequest if it is not even text of its kind."""
    if constraint.kind == "regex":
        # Which llguidance would leave out.
        if (len(constraint.source) - len(constraint.source.rstrip("\\"))) % 2:
            raise InvalidRequest("the regex ends with a backslash that escapes nothing; leave it out, or write two")
        # \d and \w mean ASCII, as in JavaScript and so in a schema's patterns; by default all of Unicode's.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(constraint.source, 'dw')}/")
    if constraint.kind == "grammar":
        return LLMatcher.grammar_from_lark(constraint.source)
    try:
        return LLMatcher.grammar_from_json_schema(constraint.source, defaults={"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise InvalidRequest(f"the json_schema is not a JSON object: {error}") from None


def _follow_all(chosen: Sequence[tuple[ConstraintState, int]]) -> None:
    for state, token_id in chosen:
        state.follow(token_id)
