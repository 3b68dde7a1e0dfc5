"""`Generator`: one replica's answers. Prompts to token ids, tokens to chunks of text; no Ray."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from deployments.call_grammar import call_grammar
from deployments.choice_seeds import choice_seed
from deployments.detokenizer import AnswerWriter, Written
from deployments.engine_client import EngineClient
from deployments.generation import CallRules, GenerateCall, GenerateChunk, ScoredToken
from deployments.merged_streams import merged
from deployments.stream_pace import StreamPace
from deployments.token_stream import TokenStream
from deployments.tokenizer import ModelTokenizer
from deployments.tool_calls import Spoken, ToolReader, tool_reader
from lora_core import errors
from lora_core.errors import EngineError, InvalidRequest, LoRAFleetError
from lora_core.messages import (
    Constraint,
    EngineReady,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Timeline,
    TokenDelta,
    TokenLogprobs,
)

LONG_PROMPT = 2048
"""Characters from which a prompt is encoded on a thread: about 1 ms of work."""

TURN = 32
"""Characters that a template writes around each message of a chat, or so."""


@dataclass(frozen=True)
class Prompt:
    """A call's prompt as the engine takes it."""

    token_ids: list[int]
    sampling: SamplingParams


class Generator:
    """Answers calls through one engine.

    Args:
        client: The engine's, started.
        ready: What it said it can take.
        tokenizer: The base model's; None where its folder has none, and only token ids are understood.
        pace: How often tokens are sent.
    """

    def __init__(
        self,
        client: EngineClient,
        ready: EngineReady,
        tokenizer: ModelTokenizer | None,
        pace: StreamPace | None = None,
    ) -> None:
        self._client = client
        self._ready = ready
        self._tokenizer = tokenizer
        self._pace = pace or StreamPace(longest_s=0.0)

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateChunk, None]:
        """Stream the call's answers: a chunk as soon as one has text, and further ones as often as `pace` has it, each
        with all its tokens that have arrived by then.

        Each of the `n` answers is a request of its own in the engine. Closing the iterator ends them there; so does an
        error of one of them.

        Raises:
            InvalidRequest: the call can never be served.
            AdapterError: as the engine says: the adapter is not loaded, lost, or unloaded in the middle of the answer.
            EngineDead: the engine ended, or no longer makes progress.
        """
        prompt = await self._prompt(call)
        rendered = await self._render(call)
        readers = [self._tool_reader(call, rendered) for _ in range(call.n)]
        if call.call_rules is not None:
            prompt = await asyncio.to_thread(self._held_to_rules, call, call.call_rules, prompt, rendered)
        answers = [_Answer(index, call, prompt, self._tokenizer, reader) for index, reader in enumerate(readers)]
        streams: list[TokenStream] = []
        # A stop string ends an answer when it is seen, and the engine goes on until then.
        is_read = call.streamed or bool(call.stop)
        try:
            streams.extend(self._client.submit(_request(index, call, prompt)) for index in range(call.n))
            with self._pace.counted():
                async with aclosing(merged(streams)) as deltas:
                    async for index, delta in deltas:
                        chunk = answers[index].take(delta)
                        if chunk is None:
                            continue
                        yield chunk
                        if chunk.finish_reason is not None:
                            streams[index].close()
                        else:
                            streams[index].rest(self._pace.window_s(is_read=is_read))
        finally:
            for stream in streams:
                stream.close()

    async def _prompt(self, call: GenerateCall) -> Prompt:
        if sum(given is not None for given in (call.messages, call.prompt, call.prompt_token_ids)) != 1:
            raise InvalidRequest("expected exactly one of messages, prompt and prompt_token_ids")
        if call.prompt_token_ids is not None:
            token_ids = call.prompt_token_ids
            self._check_token_ids(token_ids)
        else:
            self._check_characters(_num_characters(call))
            token_ids = await asyncio.to_thread(self._encode, call) if _is_long(call) else self._encode(call)
        self._check_stops(call)
        if not 1 <= call.n <= self._ready.max_num_seqs:
            raise InvalidRequest(
                f"n is {call.n}; it must be from 1 to {self._ready.max_num_seqs} (engine.max_num_seqs, the requests "
                "that one engine runs at once, which the operator of this server can raise)"
            )
        if call.sampling.logprobs is not None or call.sampling.prompt_logprobs is not None or call.echo:
            await self._prepare_words(call)
        sampling = msgspec.structs.replace(call.sampling, max_tokens=self._max_tokens(call, token_ids))
        # Of no tokens, none can be asked for.
        return Prompt(token_ids, msgspec.structs.replace(sampling, min_tokens=0) if call.max_tokens == 0 else sampling)

    async def _render(self, call: GenerateCall) -> str:
        """A chat with tools as its template writes it; empty for any other call."""
        if not call.tools or call.messages is None or self._tokenizer is None:
            return ""
        return await asyncio.to_thread(self._tokenizer.render_chat, call.messages, call.tools)

    def _tool_reader(self, call: GenerateCall, rendered: str) -> ToolReader | None:
        """What reads the calls in an answer; None where no tools were given."""
        if not rendered or self._tokenizer is None:
            return None
        return tool_reader(self._tokenizer, rendered, call.tools)

    def _held_to_rules(self, call: GenerateCall, rules: CallRules, prompt: Prompt, rendered: str) -> Prompt:
        """The prompt, its answer held to the rules for calls. Raises InvalidRequest where that cannot be."""
        reader = self._tool_reader(call, rendered)
        if reader is None or self._tokenizer is None:
            raise InvalidRequest(
                "tool_choice, or a tool that is strict, asks for calls of a certain form, and nothing says in which "
                "form the base model writes them; leave out tool_choice and strict"
            )
        grammar = call_grammar(self._tokenizer, lambda: self._tool_reader(call, rendered), call.tools, rules)
        constraint = Constraint("grammar", grammar)
        return Prompt(prompt.token_ids, msgspec.structs.replace(prompt.sampling, constraint=constraint))

    async def _prepare_words(self, call: GenerateCall) -> None:
        if self._tokenizer is None:
            raise InvalidRequest("the base model's folder holds no tokenizer, so logprobs and echo cannot be written")
        if call.sampling.logprobs is not None or call.sampling.prompt_logprobs is not None:
            await asyncio.to_thread(self._tokenizer.prepare_token_bytes)

    def _check_characters(self, num_characters: int) -> None:
        """Refuse a prompt that no tokens could fit in: encoding it would only hold up the others."""
        most = self._ready.max_model_len * (self._tokenizer.longest_token if self._tokenizer is not None else 1)
        if num_characters > most:
            raise InvalidRequest(
                f"the prompt has {num_characters} characters, which is over the context of {self._ready.max_model_len} "
                "tokens however they are cut; shorten the prompt, or ask the operator of this server to raise "
                "engine.max_model_len"
            )

    def _encode(self, call: GenerateCall) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequest("the base model's folder holds no tokenizer; send prompt_token_ids")
        if call.messages is not None:
            text = self._tokenizer.render_chat(call.messages, call.tools)
            # Names, calls and what templates add count as well.
            self._check_characters(len(text))
            return self._tokenizer.encode_rendered(text)
        assert call.prompt is not None, "one of the three is given"
        return self._tokenizer.encode(call.prompt)

    def _check_token_ids(self, token_ids: list[int]) -> None:
        top = self._ready.vocab_size - 1
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= top:
            index, wrong = next((index, found) for index, found in enumerate(token_ids) if not 0 <= found <= top)
            raise InvalidRequest(
                f"prompt_token_ids[{index}] is {wrong}; the base model's token ids run from 0 to {top}"
            )

    def _check_stops(self, call: GenerateCall) -> None:
        if not call.stop:
            return
        if self._tokenizer is None:
            raise InvalidRequest("the base model's folder holds no tokenizer, so stop strings cannot be found")
        if not all(call.stop):
            raise InvalidRequest("a stop string is empty; it needs at least one character")

    def _max_tokens(self, call: GenerateCall, token_ids: list[int]) -> int:
        num_prompt, context = len(token_ids), self._ready.max_model_len
        if not num_prompt:
            raise InvalidRequest("the prompt is empty; it needs at least one token")
        if num_prompt >= context:
            raise InvalidRequest(
                f"the prompt has {num_prompt} tokens and the context holds {context}, the answer included; "
                "shorten the prompt, or ask the operator of this server to raise engine.max_model_len"
            )
        if call.max_tokens is None:
            return min(context - num_prompt, call.default_max_tokens or context)
        if call.max_tokens < (0 if call.echo else 1):
            raise InvalidRequest(f"max_tokens is {call.max_tokens}; it must be at least 1, or with echo 0")
        if num_prompt + call.max_tokens > context:
            raise InvalidRequest(
                f"the prompt has {num_prompt} tokens and max_tokens is {call.max_tokens}, together "
                f"{num_prompt + call.max_tokens}; the context holds {context}: shorten the prompt, lower max_tokens, "
                "or ask the operator of this server to raise engine.max_model_len"
            )
        # An engine's answer has one token at least; one that is not wanted is left out of the answer.
        return max(call.max_tokens, 1)


class _Answer:
    """The state of one answer between its chunks."""

    def __init__(
        self,
        index: int,
        call: GenerateCall,
        prompt: Prompt,
        tokenizer: ModelTokenizer | None,
        reader: ToolReader | None = None,
    ) -> None:
        self._index = index
        self._reader = reader
        self._most_calls = 1 if call.one_tool_call else None
        self._has_tokens = call.max_tokens != 0
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._num_tokens = 0
        self._token_ids: list[int] = []
        self._num_cached_tokens = 0
        self._timeline: Timeline | None = None
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_scores: list[ScoredToken] | None = None
        self._unwritten = ""
        self._writer: AnswerWriter | None = None
        if tokenizer is not None:
            self._writer = AnswerWriter(
                tokenizer.backend,
                prompt.token_ids,
                call.stop,
                prompt.sampling.min_tokens,
                # Models may mark calls with special tokens.
                keep_special=reader is not None,
            )
            if call.echo:
                self._unwritten = tokenizer.decode(prompt.token_ids) if call.prompt is None else call.prompt

    def take(self, delta: TokenDelta) -> GenerateChunk | None:
        """Turn new tokens into a chunk; None while they add no text."""
        if delta.finish_reason == "error":
            raise _error_named(delta.error_type, delta.error or "the engine gave no reason")
        written = self._write(delta)
        self._num_cached_tokens += delta.num_cached_tokens
        self._timeline = delta.timeline or self._timeline
        self._token_ids += delta.token_ids[: written.num_tokens]
        self._logprobs += (delta.logprobs or [])[: written.num_tokens]
        if delta.prompt_logprobs is not None:
            self._prompt_scores = self._score_prompt(delta.prompt_logprobs)
        text, self._unwritten = self._unwritten + written.text, ""
        finish_reason = "stop" if written.stopped else delta.finish_reason
        if not self._has_tokens and finish_reason is not None:
            finish_reason = "length"
        spoken = Spoken(text)
        if self._reader is not None:
            spoken = self._reader.read(text, final=finish_reason is not None)
        if self._writer is not None and not spoken.text and finish_reason is None:
            return None
        return self._chunk(spoken, finish_reason)

    def _chunk(self, spoken: Spoken, finish_reason: FinishReason | None) -> GenerateChunk:
        """What has arrived since the last one."""
        self._num_tokens += len(self._token_ids)
        token_ids, self._token_ids = self._token_ids, []
        logprobs, self._logprobs = self._logprobs, []
        prompt_scores, self._prompt_scores = self._prompt_scores, None
        timeline, self._timeline = self._timeline, None
        asks = self._prompt.sampling.logprobs is not None
        return GenerateChunk(
            text=spoken.text,
            reasoning=spoken.reasoning,
            tool_calls=spoken.calls[: self._most_calls],
            token_ids=token_ids,
            index=self._index,
            scores=self._score(token_ids, logprobs) if asks else None,
            prompt_scores=prompt_scores,
            timeline=timeline,
            finish_reason=finish_reason,
            prompt_tokens=len(self._prompt.token_ids),
            cached_tokens=self._num_cached_tokens,
            completion_tokens=self._num_tokens,
        )

    def _score_prompt(self, logprobs: list[TokenLogprobs]) -> list[ScoredToken]:
        first, *rest = self._prompt.token_ids
        return [self._scored(first, None), *self._score(rest, logprobs)]

    def _score(self, token_ids: list[int], logprobs: list[TokenLogprobs]) -> list[ScoredToken]:
        return [
            self._scored(token_id, one.logprob, [*map(self._scored, one.top_ids, one.top_logprobs)])
            for token_id, one in zip(token_ids, logprobs, strict=True)
        ]

    def _scored(self, token_id: int, logprob: float | None, top: Sequence[ScoredToken] = ()) -> ScoredToken:
        assert self._tokenizer is not None, "without one, log-probabilities are refused"
        data, special = self._tokenizer.token_bytes(token_id), self._tokenizer.is_special(token_id)
        return ScoredToken(token_id, data, logprob, list(top), special)

    def _write(self, delta: TokenDelta) -> Written:
        if not self._has_tokens:
            return Written("", 0, False)
        if self._writer is None:
            return Written("", len(delta.token_ids), False)
        # "stop" is the engine's word for an answer ended by its last token, which is not part of the text.
        return self._writer.write(
            delta.token_ids, silent_last=delta.finish_reason == "stop", final=delta.finish_reason is not None
        )


def _request(index: int, call: GenerateCall, prompt: Prompt) -> GenerateRequest:
    sampling = prompt.sampling
    if sampling.seed is not None:
        sampling = msgspec.structs.replace(sampling, seed=choice_seed(sampling.seed, index))
    return GenerateRequest(
        call.request_id,
        prompt.token_ids,
        sampling,
        call.lora_name,
        call.cache_salt,
        is_traced=bool(call.traceparent),
    )


def _error_named(name: str, sentence: str) -> LoRAFleetError:
    kind = getattr(errors, name, EngineError)
    return kind(sentence) if issubclass(kind, LoRAFleetError) else EngineError(sentence)


def _num_characters(call: GenerateCall) -> int:
    """What is said in a prompt."""
    if call.prompt is not None:
        return len(call.prompt)
    parts: list[Any] = [message.get("content") for message in call.messages or () if isinstance(message, dict)]
    return sum(len(str(part)) for part in (*parts, *call.tools))


def _is_long(call: GenerateCall) -> bool:
    """Whether to render and encode a prompt takes so long that others would be held up."""
    if call.prompt is not None:
        return len(call.prompt) >= LONG_PROMPT
    left = LONG_PROMPT - sum(len(str(tool)) for tool in call.tools)
    for message in call.messages or ():
        left -= TURN + sum(len(part) for part in message.values() if isinstance(part, str))
        if left <= 0 or "tool_calls" in message:
            return True
    return left <= 0
