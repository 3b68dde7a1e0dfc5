"""Texts to tokens and back, for whoever asks a replica."""

import asyncio

from deployments.text_calls import TextCall, TextTokens, TokensCall
from deployments.tokenizer import ModelTokenizer
from lora_core.errors import InvalidRequest
from lora_core.messages import EngineReady


class Tokenization:
    """Answers calls about tokens with the base model's tokenizer, on threads: a text may be long.

    Args:
        tokenizer: None where the model's folder has none.
        ready: What the engine said it can take.
    """

    def __init__(self, tokenizer: ModelTokenizer | None, ready: EngineReady) -> None:
        self._tokenizer = tokenizer
        self._ready = ready

    async def tokenize(self, call: TextCall) -> TextTokens:
        """The tokens of a text or chat. Raises InvalidRequest where the model cannot have it."""
        return await asyncio.to_thread(self._tokenize, self._needed(), call)

    async def detokenize(self, call: TokensCall) -> str:
        """The text of tokens, special ones included. Raises InvalidRequest for a token there is not."""
        return await asyncio.to_thread(self._detokenize, self._needed(), call.token_ids)

    def _needed(self) -> ModelTokenizer:
        if self._tokenizer is None:
            raise InvalidRequest("the base model's folder holds no tokenizer")
        return self._tokenizer

    def _tokenize(self, tokenizer: ModelTokenizer, call: TextCall) -> TextTokens:
        if call.messages is not None:
            text = tokenizer.render_chat(call.messages, call.tools, add_generation_prompt=call.add_generation_prompt)
        else:
            assert call.prompt is not None, "one of the two is given"
            text = call.prompt
        token_ids = tokenizer.encode(text, add_special_tokens=call.add_special_tokens)
        names = [tokenizer.token_name(token_id) for token_id in token_ids] if call.with_names else None
        return TextTokens(token_ids, self._ready.max_model_len, names)

    def _detokenize(self, tokenizer: ModelTokenizer, token_ids: list[int]) -> str:
        most = self._ready.vocab_size - 1
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id <= most:
                raise InvalidRequest(f"tokens[{index}] is {token_id}; the base model's token ids run from 0 to {most}")
        return tokenizer.decode(token_ids)
