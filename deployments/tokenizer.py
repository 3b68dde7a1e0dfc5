"""`ModelTokenizer`: a base model's tokenizer and chat template, loaded by transformers and safe to share by threads."""

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from lora_core.errors import ConfigError, InvalidRequest

GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""What a tokenizer_config.json says of a tokenizer.json that needs no class of its own."""

OWN_FORMAT_MODELS = ("mistral", "mixtral", "ministral", "pixtral", "voxtral")
"""`model_type`s for which transformers prefers a file other than tokenizer.json where there is one."""


class ModelTokenizer:
    """Turns prompts and chats into the base model's token ids.

    Texts are encoded by the tokenizers library itself: transformers' own call sets padding and truncation first, which
    two threads must not do at once.

    Args:
        folder: The base model's.

    Raises:
        ConfigError: the tokenizer cannot be loaded, or not as a tokenizer.json would be.
    """

    def __init__(self, folder: Path) -> None:
        self._pretrained = _load(folder)
        backend = getattr(self._pretrained, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ConfigError(
                f"{folder}: its tokenizer ({type(self._pretrained).__name__}) has no form the tokenizers library can "
                "run; save the model with a tokenizer.json"
            )
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.longest_token = max(map(len, backend.get_vocab()), default=1)
        """Most characters one token can stand for."""
        self._special = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._byte_table: LLTokenizer | None = None
        self._lock = threading.Lock()

    @staticmethod
    def exists(folder: Path) -> bool:
        """Whether the model comes with a tokenizer at all; without one it is asked by token ids."""
        return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))

    def encode(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text to continue.

        Args:
            prompt: The text.
            add_special_tokens: With whatever the tokenizer puts before a text (a bos token).

        Raises:
            InvalidRequest: not text: it holds half of a surrogate pair.
        """
        return self._encode(prompt, add_special_tokens=add_special_tokens)

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """A chat as the model's template writes it.

        Args:
            messages: The turns.
            tools: Functions the model may call, as OpenAI's API describes them.
            add_generation_prompt: End where the assistant's next turn starts.

        Raises:
            InvalidRequest: the model has no template, it knows no tools, or it refuses these messages.
        """
        if not self._pretrained.chat_template:
            raise InvalidRequest("the base model has no chat template; send a prompt to /v1/completions instead")
        if tools and not self.knows_tools:
            raise InvalidRequest("tools: the base model's chat template knows no tools; leave them out")
        try:
            text: str = self._pretrained.apply_chat_template(
                messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:
            # A template is the model author's program: it refuses with whatever exception it likes.
            raise InvalidRequest(f"the base model's chat template refuses these messages: {error}") from None
        return text

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered chat: the template has written every special token the model wants."""
        return self._encode(text, add_special_tokens=False)

    @property
    def chat_template(self) -> str:
        """The model's template for chats with tools, where it has one for them; empty without any."""
        template = self._pretrained.chat_template or ""
        if isinstance(template, dict):
            return str(template.get("tool_use") or template.get("default") or "")
        return str(template)

    @property
    def knows_tools(self) -> bool:
        """Whether the template tells the model of tools."""
        return re.search(r"\btools\b", self.chat_template) is not None

    @property
    def response_template(self) -> dict[str, Any] | None:
        """How the model's answers are to be read, where its author says so (transformers' `response_template`)."""
        template = getattr(self._pretrained, "response_template", None)
        return template if isinstance(template, dict) else None

    def token_name(self, token_id: int) -> str | None:
        """The token as its vocabulary writes it; None where there is no such token."""
        return self.backend.id_to_token(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=False))

    def is_special(self, token_id: int) -> bool:
        """Whether a token stands for itself, and is left out of texts."""
        return token_id in self._special

    @property
    def end_of_text(self) -> str | None:
        """The token that ends an answer, by its name; None where the tokenizer names none."""
        token = self._pretrained.eos_token
        return None if token is None else str(token)

    def prepare_token_bytes(self) -> None:
        """Do what `token_bytes` needs, once: a fraction of a second, and some tens of MB for a large vocabulary.

        Raises:
            InvalidRequest: there is no telling, with this tokenizer.
        """
        with self._lock:
            if self._byte_table is None:
                try:
                    self._byte_table = LLTokenizer(self.backend.to_str())
                except Exception as error:
                    raise InvalidRequest(
                        f"the base model's tokenizer does not tell its tokens' bytes: {error}"
                    ) from None

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 of one token, whatever stands around it: perhaps a part of a character; its name, if it is special."""
        self.prepare_token_bytes()
        assert self._byte_table is not None, "it is prepared"
        return self._byte_table.decode_bytes([token_id])

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"not text: half of a surrogate pair at character {error.start}") from None
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)


def _load(folder: Path) -> Any:
    try:
        if _is_generic(folder):
            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        # Imports torch: three seconds of CPU and 240 MB that a process without tensors can do without.
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # transformers raises everything from OSError to AttributeError for a file it cannot read.
        summary = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(f"{folder}: its tokenizer cannot be loaded: {summary}") from None


def _is_generic(folder: Path) -> bool:
    """Whether AutoTokenizer would read tokenizer.json as it is."""
    if not (folder / "tokenizer.json").is_file():
        return False
    settings = _read_json(folder / "tokenizer_config.json")
    model_type = str(_read_json(folder / "config.json").get("model_type", ""))
    return (
        settings.get("tokenizer_class") in GENERIC_CLASSES
        and "auto_map" not in settings
        and not model_type.startswith(OWN_FORMAT_MODELS)
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
