"""What a run sends, and what it asks of the answers."""

import re
from enum import Enum
from typing import NamedTuple

MAX_IN_FLIGHT = 1000
"""Most requests under way: as many connections as OpenAI's client opens."""

MAX_REQUESTS = 100_000


class Api(str, Enum):
    """Which of OpenAI's two interfaces is asked."""

    CHAT = "chat"
    COMPLETIONS = "completions"


class Arrivals(str, Enum):
    """When requests come."""

    POISSON = "poisson"
    """Independent of each other, as those of many users are."""
    CONSTANT = "constant"
    """One by one, all the same time apart."""
    BURSTS = "bursts"
    """Times between them are gamma-distributed, with a shape below that of Poisson's."""
    CLOSED = "closed"
    """So many users, each of whom asks again when answered."""


class Lengths(NamedTuple):
    """A range from which lengths are drawn, all of them equally often; both ends are in it."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """From `64`, or `32:128`. Raises ValueError."""
        found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
        if found is None:
            raise ValueError(f"found {text!r}; expected a length, as in 64, or a range, as in 32:128")
        low, high = int(found[1]), int(found[2] or found[1])
        if not 1 <= low <= high:
            raise ValueError(f"found {text!r}; expected a range from at least 1 up, as in 32:128")
        return cls(low, high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


class Targets(NamedTuple):
    """What an answer must keep to be good, and how many of an adapter's must be.

    Attributes:
        ttft_ms: Longest time to its first token, from the moment it was due.
        inter_token_ms: Longest mean time from one token to the next.
        adapter_share: Share of an adapter's answers that must be good for the adapter to be within its targets.
    """

    ttft_ms: float
    inter_token_ms: float
    adapter_share: float


class Load(NamedTuple):
    """What is sent.

    Attributes:
        num_requests: How many.
        arrivals: When.
        rate: Requests a second, of all but closed arrivals.
        burstiness: Shape of the gamma distribution of bursts: Poisson's is 1, smaller is burstier.
        num_users: Of closed arrivals.
        zipf: Adapter k of the catalogue is asked as often as 1 / k to the power of this; 0: all are asked as often.
        base_share: Share of requests that ask the base model.
        prompt_words: Lengths of made-up prompts.
        answer_tokens: Most tokens of answers.
        seed: Decides everything that is drawn.
    """

    num_requests: int
    arrivals: Arrivals
    rate: float
    burstiness: float
    num_users: int
    zipf: float
    base_share: float
    prompt_words: Lengths
    answer_tokens: Lengths
    seed: int


class Sending(NamedTuple):
    """How requests are sent.

    Attributes:
        api: The interface.
        max_in_flight: A request that is due while so many are under way is not sent, and counts as missed.
        timeout_s: Longest wait for a whole answer.
        max_seconds: Nothing is sent after so long.
        cold_after_s: An adapter not heard of for so long is cold again; None: never.
        temperature: Of all requests.
        ignore_eos: Let answers reach their full length, where the server knows vLLM's field `ignore_eos`.
    """

    api: Api
    max_in_flight: int
    timeout_s: float
    max_seconds: float
    cold_after_s: float | None
    temperature: float
    ignore_eos: bool
