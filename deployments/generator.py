"""`Generator`: one replica's answers. Prompts to token ids, tokens to chunks of text; no Ray."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec

from deployments.detokenizer import AnswerWriter, Written
from deployments.engine_client import EngineClient
from deployments.generation import GenerateCall, GenerateChunk
from deployments.tokenizer import ModelTokenizer
from lora_core import errors
from lora_core.errors import EngineError, InvalidRequest, LoRAFleetError
from lora_core.messages import EngineReady, GenerateRequest, SamplingParams, TokenDelta

LONG_PROMPT = 2048
"""Characters from which a prompt is encoded on a thread: about 1 ms of work."""


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
    """

    def __init__(self, client: EngineClient, ready: EngineReady, tokenizer: ModelTokenizer | None) -> None:
        self._client = client
        self._ready = ready
        self._tokenizer = tokenizer

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateChunk, None]:
        """Stream an answer: a chunk whenever there is text, with all tokens that have arrived by then.

        Closing the iterator ends the request in the engine.

        Raises:
            InvalidRequest: the call can never be served.
            AdapterError: as the engine says: the adapter is not loaded, lost, or unloaded in the middle of the answer.
            EngineDead: the engine ended, or no longer makes progress.
        """
        prompt = await self._prompt(call)
        answer = _Answer(call, prompt, self._tokenizer)
        request = GenerateRequest(call.request_id, prompt.token_ids, prompt.sampling, call.lora_name)
        stream = self._client.submit(request)
        try:
            async for delta in stream:
                chunk = answer.take(delta)
                if chunk is not None:
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
        finally:
            stream.close()

    async def _prompt(self, call: GenerateCall) -> Prompt:
        if sum(given is not None for given in (call.messages, call.prompt, call.prompt_token_ids)) != 1:
            raise InvalidRequest("expected exactly one of messages, prompt and prompt_token_ids")
        if call.prompt_token_ids is not None:
            token_ids = call.prompt_token_ids
            self._check_token_ids(token_ids)
        elif self._num_characters(call) < LONG_PROMPT:
            token_ids = self._encode(call)
        else:
            token_ids = await asyncio.to_thread(self._encode, call)
        self._check_stops(call)
        return Prompt(token_ids, msgspec.structs.replace(call.sampling, max_tokens=self._max_tokens(call, token_ids)))

    def _num_characters(self, call: GenerateCall) -> int:
        """The prompt's length, refused where no tokens could fit it in: encoding it would only hold up the others."""
        num_characters = _num_characters(call)
        most = self._ready.max_model_len * (self._tokenizer.longest_token if self._tokenizer is not None else 1)
        if num_characters > most:
            raise InvalidRequest(
                f"the prompt has {num_characters} characters, which is over the context of {self._ready.max_model_len} "
                "tokens however they are cut; shorten the prompt, or raise max_model_len"
            )
        return num_characters

    def _encode(self, call: GenerateCall) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequest("the base model's folder holds no tokenizer; send prompt_token_ids")
        if call.messages is not None:
            return self._tokenizer.encode_chat(call.messages)
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
                "shorten the prompt, or raise max_model_len"
            )
        if call.max_tokens is None:
            return min(context - num_prompt, call.default_max_tokens or context)
        if call.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {call.max_tokens}; it must be at least 1")
        if num_prompt + call.max_tokens > context:
            raise InvalidRequest(
                f"the prompt has {num_prompt} tokens and max_tokens is {call.max_tokens}, together "
                f"{num_prompt + call.max_tokens}; the context holds {context}: shorten the prompt, lower max_tokens, "
                "or raise max_model_len"
            )
        return call.max_tokens


class _Answer:
    """The state of one answer between its chunks."""

    def __init__(self, call: GenerateCall, prompt: Prompt, tokenizer: ModelTokenizer | None) -> None:
        self._num_prompt_tokens = len(prompt.token_ids)
        self._num_tokens = 0
        self._token_ids: list[int] = []
        self._writer = AnswerWriter(tokenizer.backend, prompt.token_ids, call.stop) if tokenizer is not None else None

    def take(self, delta: TokenDelta) -> GenerateChunk | None:
        """Turn new tokens into a chunk; None while they add no text."""
        if delta.finish_reason == "error":
            raise _error_named(delta.error_type, delta.error or "the engine gave no reason")
        written = self._write(delta)
        self._token_ids += delta.token_ids[: written.num_tokens]
        finish_reason = "stop" if written.stopped else delta.finish_reason
        if self._writer is not None and not written.text and finish_reason is None:
            return None
        self._num_tokens += len(self._token_ids)
        token_ids, self._token_ids = self._token_ids, []
        return GenerateChunk(
            text=written.text,
            token_ids=token_ids,
            finish_reason=finish_reason,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_tokens,
        )

    def _write(self, delta: TokenDelta) -> Written:
        if self._writer is None:
            return Written("", len(delta.token_ids), False)
        # "stop" is the engine's word for an answer ended by its last token, which is not part of the text.
        return self._writer.write(
            delta.token_ids, silent_last=delta.finish_reason == "stop", final=delta.finish_reason is not None
        )


def _error_named(name: str, sentence: str) -> LoRAFleetError:
    kind = getattr(errors, name, EngineError)
    return kind(sentence) if issubclass(kind, LoRAFleetError) else EngineError(sentence)


def _num_characters(call: GenerateCall) -> int:
    if call.prompt is not None:
        return len(call.prompt)
    return sum(len(str(message.get("content"))) for message in call.messages or () if isinstance(message, dict))
