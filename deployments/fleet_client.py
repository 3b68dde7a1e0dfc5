"""`FleetClient`: the operator's routes over HTTP, for the command line."""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from cluster.status import AdapterReport, FleetReport
from lora_core.errors import LoRAFleetError

Content = TypeVar("Content")

CHANGE_TIMEOUT_S = 600.0
"""Longest wait for a change: longer than the server's own patience, `router.change_timeout_s`, by default."""

READ_TIMEOUT_S = 15.0


class Unreachable(LoRAFleetError):
    """Nothing answers at the address, or something that is not this server."""


class Refused(LoRAFleetError):
    """The server answered with an error; the message is the server's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        """Of HTTP."""


class Changed(NamedTuple):
    """How a change ended."""

    is_everywhere: bool
    """Whether all replicas have done it."""
    body: dict[str, Any]
    """What the server said: `status`, `message`, `replicas`, and more for a load."""


class _AdapterList(msgspec.Struct):
    data: list[AdapterReport]
    has_more: bool


class FleetClient:
    """One server.

    Args:
        url: Its address, e.g. `http://127.0.0.1:8000`.
        key: Sent as a bearer token, where the server asks for one.
        transport: In place of the network.
    """

    def __init__(self, url: str, key: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        self._url = url
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=READ_TIMEOUT_S, transport=transport)
        except (httpx.InvalidURL, ValueError) as error:
            raise Unreachable(f"{url!r} is no address: {error}; expected one like http://127.0.0.1:8000") from None

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def fleet(self) -> FleetReport:
        """The replicas, and the last failures."""
        return self._decoded(self._ask("GET", "/v1/fleet"), FleetReport)

    def adapters(self) -> Iterator[AdapterReport]:
        """Every desired adapter, in the order of their names."""
        after, has_more = "", True
        while has_more:
            found = self._decoded(self._ask("GET", "/v1/adapters", params={"after": after}), _AdapterList)
            yield from found.data
            has_more = found.has_more and bool(found.data)
            after = found.data[-1].name if found.data else after

    def adapter(self, name: str) -> AdapterReport:
        """One desired adapter."""
        return self._decoded(self._ask("GET", f"/v1/adapters/{quote(name, safe='')}"), AdapterReport)

    def load(self, name: str, path: str, *, in_place: bool = False) -> Changed:
        """Load an adapter on every replica."""
        return self._change("load_lora_adapter", lora_name=name, lora_path=path, load_inplace=in_place)

    def unload(self, name: str) -> Changed:
        """Stop serving an adapter."""
        return self._change("unload_lora_adapter", lora_name=name)

    def pin(self, name: str) -> Changed:
        """Keep an adapter in a slot of every replica."""
        return self._change("pin_lora_adapter", lora_name=name)

    def unpin(self, name: str) -> Changed:
        """Let an adapter's slot be taken again."""
        return self._change("unpin_lora_adapter", lora_name=name)

    def _change(self, route: str, **body: Any) -> Changed:
        answer = self._ask("POST", f"/v1/{route}", json=body, timeout=CHANGE_TIMEOUT_S)
        return Changed(answer.status_code != httpx.codes.MULTI_STATUS, self._decoded(answer, dict[str, Any]))

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise Unreachable(f"{self._url} does not answer: {reason}; name the server with --url") from None
        if answer.is_success:
            return answer
        raise Refused(_error_message(answer), answer.status_code)

    def _decoded(self, answer: httpx.Response, kind: type[Content]) -> Content:
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.MsgspecError as error:
            raise Unreachable(f"{self._url} answers, but not as this program expects ({error})") from None


def _error_message(answer: httpx.Response) -> str:
    """The message in OpenAI's envelope; the body's beginning where there is none."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}: {answer.text[:200]}"
