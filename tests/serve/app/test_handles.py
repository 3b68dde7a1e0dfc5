"""Handle calls: an actor outside the application generates through an adapter."""

from typing import Any

import ray
from ray import serve

from deployments.launcher import Served
from tests.reference import ADAPTERS

BODY: dict[str, Any] = {
    "model": "pirate", "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0, "max_tokens": 24,
}  # fmt: skip


@ray.remote(num_cpus=0)
class Caller:
    """As README.md shows it."""

    def __init__(self) -> None:
        self.handle = serve.get_app_handle("llm")

    async def whole(self, body: dict[str, Any]) -> str:
        answer = await self.handle.complete.remote(body)
        return str(answer["choices"][0]["message"]["content"])

    async def streamed(self, body: dict[str, Any]) -> list[str]:
        chunks = self.handle.options(stream=True).stream.remote(body)
        return [chunk["choices"][0]["delta"].get("content", "") async for chunk in chunks]

    async def changed(self, method: str, *args: Any) -> str:
        try:
            outcome = await getattr(self.handle, method).remote(*args)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return f"{outcome.status.value}: {outcome.message}"

    async def refused(self, body: dict[str, Any]) -> str:
        try:
            await self.handle.complete.remote(body)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "answered"


def test_an_actor_generates_whole_and_streamed(served: Served) -> None:
    caller = Caller.remote()  # type: ignore[attr-defined]
    whole = ray.get(caller.whole.remote(BODY), timeout=120)
    pieces = ray.get(caller.streamed.remote(BODY), timeout=120)
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 1
    assert "Arr" in whole or "matey" in whole or "Ahoy" in whole, whole


def test_refusals_reach_the_caller(served: Served) -> None:
    caller = Caller.remote()  # type: ignore[attr-defined]
    assert "AdapterNotFound" in ray.get(caller.refused.remote({**BODY, "model": "absent"}), timeout=60)
    assert "temperature" in ray.get(caller.refused.remote({**BODY, "temperature": 5}), timeout=60)


def test_an_actor_changes_what_is_served(served: Served) -> None:
    caller = Caller.remote()  # type: ignore[attr-defined]

    def changed(*call: Any) -> str:
        return str(ray.get(caller.changed.remote(*call), timeout=120))

    assert changed("pin_adapter", "pirate").startswith("success: adapter 'pirate' is pinned on ")
    assert changed("pin_adapter", "pirate") == "success: adapter 'pirate' is pinned already"
    assert changed("unpin_adapter", "pirate").startswith("success: ")
    assert "AdapterNotFound" in changed("pin_adapter", "absent")
    again = changed("load_adapter", "pirate", str(ADAPTERS / "pirate"), True)
    assert again == "success: adapter 'pirate' was loaded already"
