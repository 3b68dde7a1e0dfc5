"""The live page of the fleet: `GET /fleet`, and the events it follows."""

import base64
import hashlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

PAGE_PATH = "/fleet"
EVENTS_PATH = "/v1/fleet/events"

EVENT_HEADERS = {
    "Cache-Control": "no-store",
    # A proxy in between may hold back what it takes for an ordinary answer.
    "X-Accel-Buffering": "no",
}


class FleetPage:
    """One document, with all it needs in itself: it loads nothing but the events.

    It is the same for everyone and tells nothing of the fleet, so that whoever has an operator's key can open it in a
    browser, which cannot send one by itself. The page asks for the key and sends it with the question for events.
    """

    def __init__(self) -> None:
        folder = files("deployments") / "web"
        document, style, view, main = (
            (folder / name).read_text("utf-8") for name in ("fleet.html", "fleet.css", "fleet_view.js", "fleet.js")
        )
        script = view + main
        self.html = document.replace("/* style */", style).replace("/* script */", script)
        self.headers = {
            "Content-Security-Policy": "; ".join(
                (
                    "default-src 'none'",
                    f"script-src {_digest(script)}",
                    f"style-src {_digest(style)}",
                    "connect-src 'self'",
                    "img-src data:",
                    "base-uri 'none'",
                    # The key is sent by the script alone: never as part of an address.
                    "form-action 'none'",
                    "frame-ancestors 'none'",
                    # Names of adapters are text and nothing else: a browser that knows this refuses to parse them.
                    "require-trusted-types-for 'script'",
                    "trusted-types 'none'",
                )
            ),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

    def answer(self) -> Response:
        """The document."""
        return HTMLResponse(self.html, headers=self.headers)


class EventStream(StreamingResponse):
    """Events that end, and not some time later, when the client has left."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers=EVENT_HEADERS)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


def add_fleet_page(app: FastAPI, events: Callable[[], AsyncGenerator[bytes, None]]) -> None:
    """Add the page's two routes.

    They are not in the application's description: one is not for programs, and the other has no end.

    Args:
        app: `deployments.route_access` says who may use the routes.
        events: Makes the events of one viewer.
    """
    page = FleetPage()

    async def get_page(request: Request) -> Response:
        return page.answer()

    async def get_events(request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type=EventStream.media_type, headers=EVENT_HEADERS)
        return EventStream(events())

    app.add_route(PAGE_PATH, get_page, methods=["GET"], include_in_schema=False)
    app.add_route(EVENTS_PATH, get_events, methods=["GET"], include_in_schema=False)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
