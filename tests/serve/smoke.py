"""`make smoke`: start the application on a free port and compare what it answers with PEFT, token for token.

Every model (the base and the demo adapters) answers every question with 64 greedy tokens, whole and streamed, first
one at a time and then all at once. The last line is one JSON object: {"requests": n, "identical": n, "ok": true}.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deployments.local_cluster import ENVIRONMENT, free_port

NUM_TOKENS = 64
CONFIG = Path(__file__).parents[2] / "cluster" / "config.yaml"


class Case(NamedTuple):
    """One request and its right answer."""

    model: str
    question: str
    tokens: list[int]


async def ask(client: Any, case: Case, *, stream: bool) -> bool:
    """Whether the server's tokens are the right ones."""
    messages = [{"role": "user", "content": case.question}]
    body: dict[str, Any] = {"model": case.model, "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS}
    body = {**body, "return_token_ids": True, "stream": stream}
    tokens: list[int] = []
    if stream:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    tokens += json.loads(line.removeprefix("data: "))["choices"][0].get("token_ids", [])
    else:
        answer = await client.post("/v1/chat/completions", json=body)
        tokens = answer.json()["choices"][0]["token_ids"]
    if tokens != case.tokens:
        print(f"DIFFERENT {case.model}, stream={stream}: expected {case.tokens}, found {tokens}", file=sys.stderr)
    return tokens == case.tokens


async def run(url: str, cases: Sequence[Case]) -> dict[str, Any]:
    """Ask everything, alone and together."""
    import httpx

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        alone = [await ask(client, case, stream=stream) for case in cases for stream in (False, True)]
        together = await asyncio.gather(*(ask(client, case, stream=index % 2 == 0) for index, case in enumerate(cases)))
    results = [*alone, *together]
    return {"requests": len(results), "identical": sum(results), "ok": all(results)}


def main() -> int:
    """Run the smoke test; the status is 0 when every answer is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG)
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    # Ray reads its environment when it is imported.
    from deployments.launcher import deployed
    from tests.reference import DEMO_ADAPTERS, QUESTIONS, Reference

    print("computing the right answers with PEFT", file=sys.stderr)
    reference = Reference()
    cases = []
    with deployed(arguments.config, port=free_port(), report=lambda line: print(line, file=sys.stderr)) as served:
        for model in (None, *DEMO_ADAPTERS):
            name = model or served.config.settings.base_name
            cases += [Case(name, text, reference.tokens(model, text, NUM_TOKENS)) for text in QUESTIONS]
        outcome = asyncio.run(run(served.url, cases))
    print(json.dumps(outcome))
    return 0 if outcome["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
