"""Runs the tries on a fleet, and judges the answers."""

import asyncio
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.tenants.fleet import BASE, KEYS, MAX_ADAPTERS, RATE, SECRET, TenantFleet
from tests.tenants.tries import (
    CONTROL,
    Try,
    bodies,
    changes,
    completion,
    found_canaries,
    header_tricks,
    name_tricks,
    operators_routes,
    path_tricks,
    post,
    uses,
    without_key,
)

AT_ONCE = 16
PREFIX = list(range(5, 5 + 96))
"""A prompt long enough to be cached."""


@dataclass
class Report:
    """What was tried, and what went wrong."""

    num_tries: int = 0
    leaks: list[str] = field(default_factory=list)

    def check(self, is_right: bool, what: str) -> None:
        """Count one judgement."""
        self.num_tries += 1
        if not is_right:
            self.leaks.append(what)


async def send(client: httpx.AsyncClient, request: Try) -> httpx.Response:
    """Send a request as it is written: no client mends its path."""
    url = client.base_url.copy_with(raw_path=request.path.encode())
    headers = [(key.encode(), value.encode()) for key, value in request.headers.items()]
    return await client.request(request.method, url, content=request.content, headers=headers)


def judged(who: str, request: Try, answer: httpx.Response) -> str:
    """What is wrong with an answer; empty where nothing is."""
    where = f"{who}: {request.method} {request.path[:120]} {request.content[:160]!r} {request.headers}"
    if answer.status_code not in request.allowed:
        return f"{where} -> {answer.status_code}, expected {sorted(request.allowed)}: {answer.text[:300]}"
    found = found_canaries(request, " ".join([answer.text, *answer.headers.values()]))
    return f"{where} -> holds {found}: {answer.text[:300]}" if found else ""


async def run(fleet: TenantFleet, report: Report, who: str, tries: Iterable[Try], key: str | None = None) -> None:
    """Send tries, some at a time, and judge each by itself.

    Args:
        fleet: Where.
        report: Gets the judgements.
        who: Whose key it is; with another name than those of `fleet.KEYS`, only a name for the report.
        tries: What to send.
        key: Sent where `who` has none.
    """
    places = asyncio.Semaphore(AT_ONCE)

    async def one(client: httpx.AsyncClient, request: Try) -> None:
        async with places:
            wrong = judged(who, request, await send(client, request))
        report.check(not wrong, wrong)

    async with fleet.client(who if who in KEYS else None, key) as client:
        await asyncio.gather(*(one(client, request) for request in tries))


async def compare(fleet: TenantFleet, report: Report, who: str) -> None:
    """Check that a forbidden name is answered as one that nobody has."""
    async with fleet.client(who) as client:
        pairs = [(list(uses(name)) + list(changes(name, frozenset({403, 404})))) for name in (SECRET, CONTROL)]
        for forbidden, unknown in zip(*pairs, strict=True):
            answers = [await send(client, request) for request in (forbidden, unknown)]
            shown = [_plain(answer, name) for answer, name in zip(answers, (SECRET, CONTROL), strict=True)]
            report.check(shown[0] == shown[1], f"{who}: {forbidden.path}: {shown[0]} differs from {shown[1]}")


def _plain(answer: httpx.Response, name: str) -> tuple[int, str, list[str]]:
    body = answer.json()
    body.pop("request_id", None)
    return answer.status_code, json.dumps(body).replace(name, "NAME"), sorted(answer.headers)


async def state(fleet: TenantFleet) -> dict[str, Any]:
    """Everything of the others, as the fleet's operator sees it; where tensors are may change by itself."""
    async with fleet.client("operator") as client:
        cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
        found = {}
        for name in cards:
            if not name.startswith("acme/"):
                lora = (await client.get(f"/v1/models/{name}")).json().get("lora", {})
                found[name] = (cards[name], *(lora.get(key) for key in ("generation", "content_hash", "pinned")))
        return found


async def crowd(fleet: TenantFleet, report: Report, num_adapters: int) -> None:
    """Load far more adapters than the tenant may have, and see that only so many are there."""
    body = {"lora_path": str(fleet.root / "acme" / "second")}
    tries = [
        post("/v1/load_lora_adapter", {"lora_name": f"acme/crowd-{index}", **body}, frozenset({200, 429}))
        for index in range(num_adapters)
    ]
    await run(fleet, report, "acme:operator", tries)
    async with fleet.client("acme:operator") as client:
        own = [card["id"] for card in (await client.get("/v1/models")).json()["data"] if card["id"].startswith("acme/")]
        report.check(len(own) == MAX_ADAPTERS, f"acme has {len(own)} adapters and may have {MAX_ADAPTERS}: {own}")
        for name in own:
            if "crowd" in name:
                answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": name})
                report.check(answer.status_code == 200, f"{name} is not unloaded: {answer.text}")


async def cached_tokens(fleet: TenantFleet, who: str, model: str) -> int:
    """Prompt tokens that somebody's request found in a cache."""
    async with fleet.client(who) as client:
        answer = await client.post("/v1/completions", json=completion(model, prompt=PREFIX))
        count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count


async def caches(fleet: TenantFleet, report: Report) -> None:
    """See that nobody learns from the prefix cache what another tenant has asked."""
    for model in (BASE, "common"):
        await asyncio.gather(*(cached_tokens(fleet, "globex", model) for _ in range(8)))
        report.check(await cached_tokens(fleet, "globex", model) > 0, f"{model}: nothing is cached at all")
        # One request: a second one may find what the first has left there, which is acme's own.
        found = await cached_tokens(fleet, "acme", model)
        report.check(found == 0, f"{model}: acme found {found} cached tokens of globex")


async def rates(fleet: TenantFleet, report: Report) -> None:
    """Go over a rate, and see that others do not notice."""
    async with fleet.client("initech") as client:
        answers = [await client.get("/v1/models") for _ in range(RATE + 10)]
    over = [answer for answer in answers if answer.status_code == 429]
    report.check(len(over) >= 5, f"of {len(answers)} requests at once {len(over)} are over {RATE} per minute")
    for answer in over:
        report.check("retry-after" in answer.headers, "a 429 without Retry-After")
        others = [name for name in ("acme", "globex", "zebra") if name in answer.text]
        report.check(not others, f"a 429 names {others}")
    async with fleet.client("acme") as client:
        report.check((await client.get("/v1/models")).status_code == 200, "acme is held up by another tenant's rate")


async def attempt(fleet: TenantFleet, num_adapters: int) -> Report:
    """All of it."""
    report, before = Report(), await state(fleet)
    async with fleet.client() as client:
        description = (await client.get("/openapi.json")).json()
    for who, key in (("nobody", None), ("wrong", "wrong-key-0123456789"), ("nearly", "acme-user-0123456789abcdeg")):
        await run(fleet, report, who, without_key(description), key)
    for who in ("acme", "acme:operator"):
        _say(f"as {who}")
        may_change = who == "acme:operator"
        await run(fleet, report, who, operators_routes(description, may_change=may_change))
        await run(fleet, report, who, uses(SECRET))
        await run(fleet, report, who, changes(SECRET, frozenset({404 if may_change else 403})))
        await run(fleet, report, who, changes("common", frozenset({403})))
        await run(fleet, report, who, name_tricks(fleet, may_change=may_change))
        await run(fleet, report, who, header_tricks())
        await run(fleet, report, who, bodies())
        await compare(fleet, report, who)
    await run(fleet, report, "acme:operator", path_tricks(fleet))
    _say("prefix cache and rates")
    await caches(fleet, report)
    await rates(fleet, report)
    _say(f"{num_adapters} adapters")
    await crowd(fleet, report, num_adapters)
    # What a tenant may do works, after all this.
    for model in ("acme/own", "common", BASE):
        await run(fleet, report, "acme", [post("/v1/completions", completion(model), frozenset({200}))])
    after = await state(fleet)
    report.check(before == after, f"the others' things have changed: {before} -> {after}")
    return report


def _say(line: str) -> None:
    print(f"tenants: {line}", file=sys.stderr)
