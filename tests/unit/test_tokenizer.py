"""`ModelTokenizer` against transformers' own calls, and what it spares the replica's process."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from deployments.child_process import PROJECT_ROOT
from deployments.tokenizer import ModelTokenizer
from lora_core.errors import ConfigError, InvalidRequest

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"
)
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Grüße <end> 世界"}]


def save_tokenizer(folder: Path, template: str | None = TEMPLATE, tokenizer_class: str | None = None) -> Path:
    """A byte-level tokenizer that puts `<begin>` before a text, and is saved as if for short texts in batches."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", len(alphabet))]
    )
    pretrained = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<begin>", eos_token="<end>"
    )
    pretrained.chat_template = template
    pretrained.save_pretrained(folder)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    LlamaConfig(vocab_size=tokenizer.get_vocab_size()).save_pretrained(folder)
    if tokenizer_class is not None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": tokenizer_class}))
    return folder


@pytest.mark.parametrize("tokenizer_class", [None, "PreTrainedTokenizerFast", "GPT2TokenizerFast"])
def test_ids_are_those_of_transformers(tmp_path: Path, tokenizer_class: str | None) -> None:
    folder = save_tokenizer(tmp_path, tokenizer_class=tokenizer_class)
    ours, theirs = ModelTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("", "Hello", "Grüße, <end>世界 " * 40):
        assert ours.encode(text) == theirs(text).input_ids
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ours.encode_rendered(ours.render_chat(CHAT)) == expected


def test_threads_may_share_it(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path))
    texts = [f"text {index} " * 2000 for index in range(16)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(tokenizer.encode, texts))
    assert found == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        ([], "empty conversation"),
        ([{"role": "user", "content": "\udc00"}], "surrogate"),
        (["text"], "text"),
        ([{"content": "who speaks?"}], "role"),
    ],
)
def test_a_chat_that_cannot_be_rendered_is_refused(tmp_path: Path, chat: list[Any], words: str) -> None:
    strict = "{% for message in messages %}" + "{{ message.role + message.content }}{% endfor %}"
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path, template=strict))
    with pytest.raises(InvalidRequest, match=words):
        tokenizer.encode_rendered(tokenizer.render_chat(chat))


def test_a_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ModelTokenizer(save_tokenizer(tmp_path, template=None)).render_chat(CHAT)


def test_an_unreadable_tokenizer_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    assert not ModelTokenizer.exists(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert ModelTokenizer.exists(tmp_path)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        ModelTokenizer(tmp_path)


def test_a_replica_needs_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "import deployments.replica\n"
        "from deployments.tokenizer import ModelTokenizer\n"
        "tokenizer = ModelTokenizer(Path(sys.argv[1]))\n"
        "tokenizer.encode_rendered(tokenizer.render_chat([{'role': 'user', 'content': 'Hello'}]))\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program, str(save_tokenizer(tmp_path))]
    assert subprocess.run(command, cwd=PROJECT_ROOT, check=False).returncode == 0
