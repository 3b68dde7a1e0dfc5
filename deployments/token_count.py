"""How many tokens a request may make, and how many its answers have used so far."""

from collections.abc import Iterable

from deployments.generation import GenerateChunk
from deployments.openai_api import DEFAULT_COMPLETION_TOKENS, ChatCompletionRequest, GenerationRequest


def most_tokens(request: GenerationRequest) -> int:
    """Tokens of its answers at most; 0 where a chat may fill its context, whose length is not known here."""
    if isinstance(request, ChatCompletionRequest):
        most = request.max_completion_tokens or request.max_tokens or 0
    else:
        most = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    return most * (request.n or 1) * request.num_prompts


class TokenCount:
    """Tokens of one request: each of its prompts once, and its answers.

    Args:
        n: Answers to each prompt.
    """

    def __init__(self, n: int = 1) -> None:
        self._n = n
        self._by_prompt: dict[int, int] = {}
        self._by_answer: dict[int, int] = {}
        self.total = 0
        """So far."""

    def add(self, chunks: Iterable[GenerateChunk]) -> None:
        """Take note of what has arrived."""
        for chunk in chunks:
            self._note(self._by_prompt, chunk.index // self._n, chunk.prompt_tokens)
            self._note(self._by_answer, chunk.index, chunk.completion_tokens)

    def _note(self, counts: dict[int, int], key: int, count: int) -> None:
        self.total += count - counts.get(key, 0)
        counts[key] = count
