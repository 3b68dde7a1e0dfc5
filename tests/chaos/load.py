"""`Load`: clients that ask all the time, and judge every answer."""

import asyncio
import itertools
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

import httpx

from tests.chaos.truth import NUM_TOKENS, PROMPTS, Truth, completion

NUM_CLIENTS = 6
PAUSE_S = 0.05
"""Between an answer and the client's next request."""

CUT = "ended by an error event"
"""What is counted of streams that were on what was killed."""

TIMEOUT_S = 90.0
"""A request without an answer for so long is lost."""


@dataclass
class Tally:
    """What has come of the requests that ended in one stretch of time."""

    counts: Counter[str] = field(default_factory=Counter)
    """"right", "ended by an error event", "lost" and "wrong" answers."""
    faults: list[str] = field(default_factory=list)
    """A line for each that is lost or wrong."""


class Load:
    """Clients on a thread of their own, inside a `with` block.

    A stream that ends with an error event after its first token is counted as such, for the caller to judge; any other
    request without a whole answer is lost, a stream that just stops included.
    """

    def __init__(self, url: str, truth: Truth, *, seed: int = 0, num_clients: int = NUM_CLIENTS) -> None:
        self._url, self._truth = url, truth
        self._seed, self._num_clients = seed, num_clients
        self._tally = Tally()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="chaos-load")

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def next_stretch(self) -> Tally:
        """The tally since the last call."""
        tally, self._tally = self._tally, Tally()
        return tally

    @property
    def num_answers(self) -> int:
        """Requests that have ended in this stretch."""
        return self._tally.counts.total()

    @property
    def num_cut(self) -> int:
        """Streams that have ended with an error event in this stretch."""
        return self._tally.counts[CUT]

    @property
    def num_clients(self) -> int:
        """Requests that are open at a time, at most."""
        return self._num_clients

    def wait_for(self, num_answers: int, timeout_s: float = 60) -> None:
        """Wait until so many requests have ended in this stretch."""
        deadline = time.monotonic() + timeout_s
        while self.num_answers < num_answers:
            assert time.monotonic() < deadline, f"{self._tally.counts} within {timeout_s} s"
            time.sleep(0.05)

    async def _run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S) as http:
            await asyncio.gather(*(self._client(http, index) for index in range(self._num_clients)))

    async def _client(self, http: httpx.AsyncClient, index: int) -> None:
        chance = random.Random(f"{self._seed}/{index}")
        models = self._truth.models
        weights = [1 / rank for rank in range(1, len(models) + 1)]
        for turn in itertools.count():
            if self._stop.is_set():
                return
            model = chance.choices(models, weights)[0]
            prompt, num_tokens = chance.randrange(len(PROMPTS)), chance.randint(1, NUM_TOKENS)
            # Every second one streams.
            asked = self._streamed if turn % 2 else self._whole
            try:
                tokens, ending = await asked(http, model, prompt, num_tokens)
            except httpx.HTTPError as error:
                tokens, ending = [], f"lost: {type(error).__name__}: {error}"
            self._judge(model, prompt, num_tokens, tokens, ending)
            await asyncio.sleep(PAUSE_S)

    async def _whole(self, http: httpx.AsyncClient, model: str, prompt: int, num_tokens: int) -> tuple[list[int], str]:
        answer = await http.post("/v1/completions", json=completion(model, prompt, num_tokens))
        if answer.status_code != 200:
            return [], f"lost: HTTP {answer.status_code}: {answer.text[:300]}"
        return answer.json()["choices"][0]["token_ids"], "done"

    async def _streamed(
        self, http: httpx.AsyncClient, model: str, prompt: int, num_tokens: int
    ) -> tuple[list[int], str]:
        tokens: list[int] = []
        body = completion(model, prompt, num_tokens, stream=True)
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return [], f"lost: HTTP {answer.status_code}: {(await answer.aread()).decode()[:300]}"
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return tokens, "done"
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        message = event["error"]["message"]
                        return tokens, "error event" if tokens else f"lost: an error before any token: {message}"
                    tokens += event["choices"][0].get("token_ids", [])
        return tokens, f"lost: the stream stopped after {len(tokens)} tokens, without an error event"

    def _judge(self, model: str, prompt: int, num_tokens: int, tokens: list[int], ending: str) -> None:
        tally = self._tally
        if not self._truth.is_right(model, prompt, tokens):
            tally.counts["wrong"] += 1
            tally.faults.append(f"{model}, prompt {prompt}: wrong tokens: {tokens}")
        elif ending == "done" and len(tokens) == num_tokens:
            tally.counts["right"] += 1
        elif ending == "error event":
            tally.counts[CUT] += 1
        else:
            tally.counts["lost"] += 1
            tally.faults.append(f"{model}, prompt {prompt}, {num_tokens} tokens: {ending}, {len(tokens)} tokens came")
