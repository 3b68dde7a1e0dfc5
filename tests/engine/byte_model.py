"""A tiny random Llama with a tokenizer of one token a byte: it can write any text, and left alone writes garbage."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.factories import tiny_llama

END = 256
"""Token id of the end of text."""

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('tools are not for me') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_model(folder: Path) -> Path:
    """Save the model and its tokenizer, and return the folder."""
    tiny_llama(folder, vocab=END + 1, eos_token_id=END)
    save_byte_tokenizer(folder)
    return folder


def save_byte_tokenizer(folder: Path) -> None:
    """One token a byte, the end of text, and a chat template that refuses tools."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pretrained = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")  # type: ignore[no-untyped-call]
    pretrained.chat_template = TEMPLATE
    pretrained.save_pretrained(folder)
