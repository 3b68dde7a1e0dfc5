"""`Answer`: the OpenAI-style objects that answer one request, made of the chunks a replica sends."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from deployments.generation import GenerateChunk, ToolCall
from deployments.openai_api import ChatCompletionRequest, CompletionRequest, GenerationRequest
from deployments.token_scores import TextOffsets, chat_logprobs, completion_logprobs, prompt_logprobs


class Answer:
    """The objects that answer one request, whole or in chunks: they share an id, a time and a model."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._chat = isinstance(request, ChatCompletionRequest)
        self.id = ("chatcmpl-" if self._chat else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())
        # Of each choice, where its next token starts in its text.
        self._offsets: dict[int, TextOffsets] = {}

    async def chunks(self, pieces: AsyncIterator[GenerateChunk]) -> AsyncIterator[dict[str, Any]]:
        """The streamed answer: the role (chat only), the text, and the usage where it was asked for.

        Pieces of several choices come as they are ready, each with its `index`.
        """
        last: dict[int, GenerateChunk] = {}
        async for piece in pieces:
            if piece.index not in last and self._chat:
                # Of it, nothing but its prompt has been told.
                begun = msgspec.structs.replace(piece, completion_tokens=0)
                yield self._chunk({"index": piece.index, "delta": {"role": "assistant", "content": ""}}, begun)
            last[piece.index] = piece
            yield self._piece(piece)
        if self._request.include_usage and last:
            yield {**self._envelope(stream=True), "choices": [], "usage": self._usage(list(last.values()))}

    def whole(self, pieces: list[GenerateChunk]) -> dict[str, Any]:
        """The answer in one object. `pieces` is not empty."""
        by_index: dict[int, list[GenerateChunk]] = {}
        for piece in pieces:
            by_index.setdefault(piece.index, []).append(piece)
        choices = [self._choice(index, of_one) for index, of_one in sorted(by_index.items())]
        usage = self._usage([of_one[-1] for of_one in by_index.values()])
        answer = {**self._envelope(stream=False), "choices": choices, "usage": usage}
        if self._chat and self._request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs(by_index[0])
        return answer

    def _choice(self, index: int, pieces: list[GenerateChunk]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        logprobs = self._logprobs(pieces)
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(pieces[-1]),
        }
        if self._chat:
            choice["message"] = _message(text, pieces)
        else:
            choice["text"] = text
            if self._request.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._prompt_logprobs(pieces)
        if self._request.return_token_ids:
            choice["token_ids"] = [token for piece in pieces for token in piece.token_ids]
        return choice

    def _piece(self, piece: GenerateChunk) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": piece.index,
            "logprobs": self._logprobs([piece]),
            "finish_reason": self._finish_reason(piece),
        }
        if self._chat:
            choice["delta"] = _delta(piece)
        else:
            choice["text"] = piece.text
        if self._request.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return self._chunk(choice, piece)

    def _logprobs(self, pieces: Sequence[GenerateChunk]) -> dict[str, Any] | None:
        """Of the next pieces of one choice."""
        scores = [score for piece in pieces for score in piece.scores or ()]
        request = self._request
        if request.num_logprobs is None:
            return None
        if isinstance(request, CompletionRequest):
            if request.echo:
                scores = [score for piece in pieces for score in piece.prompt_scores or ()] + scores
            offsets = self._offsets.setdefault(pieces[0].index, TextOffsets())
            return completion_logprobs(scores, request.num_logprobs, offsets)
        return chat_logprobs(scores)

    def _prompt_logprobs(self, pieces: Sequence[GenerateChunk]) -> list[dict[str, Any] | None]:
        scores = [score for piece in pieces for score in piece.prompt_scores or ()]
        return prompt_logprobs(scores, self._request.prompt_logprobs or 0)

    def _finish_reason(self, last: GenerateChunk) -> str | None:
        """Why an answer ended, in OpenAI's words; None where it goes on."""
        if last.finish_reason != "stop" or not last.tool_calls:
            return last.finish_reason
        # A call of the one function that it was told to call is no news.
        is_told = isinstance(self._request, ChatCompletionRequest) and self._request.names_a_tool
        return "stop" if is_told else "tool_calls"

    def _chunk(self, choice: dict[str, Any], piece: GenerateChunk) -> dict[str, Any]:
        """One chunk of a streamed answer; `piece` tells the usage of its choice so far."""
        filled = {"index": 0, "logprobs": None, "finish_reason": None, **choice}
        usage: dict[str, Any] = {}
        if self._request.include_usage:
            usage["usage"] = self._usage([piece]) if self._request.continuous_usage else None
        return {**self._envelope(stream=True), "choices": [filled], **usage}

    def _usage(self, last: Sequence[GenerateChunk]) -> dict[str, Any]:
        """From the last chunk of each choice: a prompt counts once, however many answers it has."""
        by_prompt: dict[int, list[GenerateChunk]] = {}
        for chunk in last:
            by_prompt.setdefault(chunk.index // (self._request.n or 1), []).append(chunk)
        prompt_tokens = sum(chunks[0].prompt_tokens for chunks in by_prompt.values())
        completion_tokens = sum(chunk.completion_tokens for chunk in last)
        # Of answers to one prompt, the first one to begin found least of it.
        cached_tokens = sum(min(chunk.cached_tokens for chunk in chunks) for chunks in by_prompt.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    def _envelope(self, *, stream: bool) -> dict[str, Any]:
        chat = "chat.completion.chunk" if stream else "chat.completion"
        kind = chat if self._chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self._created, "model": self._request.model}


def _message(text: str, pieces: Sequence[GenerateChunk]) -> dict[str, Any]:
    """The assistant's message of a whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning := "".join(piece.reasoning for piece in pieces):
        message["reasoning_content"] = reasoning
    if calls := [call for piece in pieces for call in piece.tool_calls]:
        # OpenAI answers so where there is nothing to say beside the calls.
        message |= {"content": text or None, "tool_calls": [_tool_call(call) for call in calls]}
    return message


def _delta(piece: GenerateChunk) -> dict[str, Any]:
    """What a piece adds to the assistant's message."""
    delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
    if piece.reasoning:
        delta["reasoning_content"] = piece.reasoning
    if piece.tool_calls:
        delta["tool_calls"] = [{"index": index, **_tool_call(call)} for index, call in enumerate(piece.tool_calls)]
    return delta


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
