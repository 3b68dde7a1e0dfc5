"""Texts to tokens for whoever asks a replica, without a fleet."""

from pathlib import Path

import pytest

from deployments.text_calls import TextCall, TokensCall
from deployments.tokenization import Tokenization
from deployments.tokenizer import ModelTokenizer
from lora_core.errors import InvalidRequest
from lora_core.messages import EngineReady
from tests.unit.test_tokenizer import CHAT, save_tokenizer


def ready(vocab_size: int = 258) -> EngineReady:
    return EngineReady(
        max_model_len=64, num_slots=0, vocab_size=vocab_size, eos_token_ids=[], kv_cache_tokens=64, max_num_seqs=4
    )


async def test_texts_and_chats_become_the_tokens_that_requests_have(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path))
    texts = Tokenization(tokenizer, ready())
    with_begin = await texts.tokenize(TextCall(prompt="Grüße", with_names=True))
    assert with_begin.token_ids == tokenizer.encode("Grüße")
    assert with_begin.max_model_len == 64
    assert with_begin.names is not None
    assert with_begin.names[0] == "<begin>"
    bare = await texts.tokenize(TextCall(prompt="Grüße", add_special_tokens=False))
    assert (bare.token_ids, bare.names) == (with_begin.token_ids[1:], None)
    assert await texts.detokenize(TokensCall(with_begin.token_ids)) == "<begin>Grüße"
    chat = await texts.tokenize(TextCall(messages=CHAT, add_special_tokens=False))
    assert chat.token_ids == tokenizer.encode_rendered(tokenizer.render_chat(CHAT))


async def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    texts = Tokenization(ModelTokenizer(save_tokenizer(tmp_path)), ready(vocab_size=10))
    with pytest.raises(InvalidRequest, match=r"tokens\[1\] is 10; the base model's token ids run from 0 to 9"):
        await texts.detokenize(TokensCall([9, 10]))
    with pytest.raises(InvalidRequest, match="surrogate"):
        await texts.tokenize(TextCall(prompt="\ud800"))
    nothing = Tokenization(None, ready())
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        await nothing.tokenize(TextCall(prompt="x"))
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        await nothing.detokenize(TokensCall([1]))
