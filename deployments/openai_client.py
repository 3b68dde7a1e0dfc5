"""OpenAI's own client, opened on an address given to a command; and what a server's refusals say through it."""

from typing import Any
from urllib.parse import urlsplit

import openai

from deployments.fleet_client import Unreachable


def api_root(url: str) -> str:
    """The address of the API's version 1, which may be left out of `url`. Raises Unreachable: it is no address."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise Unreachable(f"{url!r} is no address; expected one like http://127.0.0.1:8000")
    root = url.rstrip("/")
    return root if root.endswith("/v1") else f"{root}/v1"


def client_options(url: str, key: str | None) -> dict[str, Any]:
    """Arguments of `openai.OpenAI` and `AsyncOpenAI`. Raises Unreachable: `url` is no address."""
    # The client insists on a key; a server without keys does not look at it.
    return {"base_url": api_root(url), "api_key": key or "none"}


def refusal(error: openai.APIError) -> str:
    """The server's own sentence, without the client's frame around it."""
    body = error.body
    if isinstance(body, dict):
        inner = body.get("error")
        message = (inner if isinstance(inner, dict) else body).get("message")
        if message:
            return str(message)
    return error.message


def unreachable(url: str, error: Exception) -> str:
    """That nothing answers at an address, and why."""
    reason = error.__cause__ or error
    return f"{url} does not answer: {str(reason) or type(reason).__name__}; name the server with --url"
