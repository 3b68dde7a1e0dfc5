"""`Conversation`: questions to one adapter, and what it answered, which later questions build on."""

from collections.abc import Generator
from typing import Any, NamedTuple

from openai import OpenAI


class Reply(NamedTuple):
    """A whole answer.

    Attributes:
        model: Who gave it, in the server's words.
        content: Its text.
        finish_reason: Why it ended; None where it was broken off.
        usage: Tokens, as the server counts them; None where it does not say.
    """

    model: str
    content: str
    finish_reason: str | None
    usage: dict[str, Any] | None


class Conversation:
    """One chat, kept on this side: the server remembers nothing of it.

    Args:
        client: Of the server.
        model: Name of the adapter, or of the base model.
        system: What the model is told before everything else.
        fields: Further fields of every request, by their names in OpenAI's API.
    """

    def __init__(self, client: OpenAI, model: str, *, system: str | None = None, **fields: Any) -> None:
        self._client = client
        self._model = model
        self._fields = fields
        self._system: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []
        self.last: Reply | None = None
        """The last answer."""

    def ask(self, question: str) -> Generator[str, None, None]:
        """Yield an answer's text as it comes.

        It is remembered once it has begun, also if the reader stops; a question without an answer is forgotten.

        Raises:
            openai.APIError: the server refuses, cannot go on, or is not there.
        """
        turn = {"role": "user", "content": question}
        # The client's types are one for each role; what is sent is what is written here.
        messages: Any = [*self._system, *self._turns, turn]
        stream = self._client.chat.completions.create(
            model=self._model, messages=messages, stream=True, stream_options={"include_usage": True}, **self._fields
        )
        text: list[str] = []
        model, finish_reason, usage = self._model, None, None
        is_whole = False
        try:
            with stream:
                for chunk in stream:
                    model = chunk.model or model
                    usage = usage if chunk.usage is None else chunk.usage.to_dict()
                    for choice in chunk.choices:
                        finish_reason = choice.finish_reason or finish_reason
                        if choice.delta.content:
                            text.append(choice.delta.content)
                            yield choice.delta.content
            is_whole = True
        finally:
            content = "".join(text)
            if content or is_whole:
                self._turns += [turn, {"role": "assistant", "content": content}]
                self.last = Reply(model, content, finish_reason, usage)

    def clear(self) -> None:
        """Forget all questions and answers; what the model was told before them stays."""
        self._turns = []

    @property
    def num_turns(self) -> int:
        """Questions that were answered."""
        return len(self._turns) // 2
