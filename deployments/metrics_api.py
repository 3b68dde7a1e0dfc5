"""The route that Prometheus asks: `GET /metrics`, for the fleet's operator."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.responses import Response

from deployments.exposition import CONTENT_TYPE


def metrics_routes(page: Callable[[], Awaitable[str]]) -> APIRouter:
    """The route over what makes the page."""
    routes = APIRouter()

    # Not one of the calls that the description is for.
    @routes.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        """The metrics of the whole fleet."""
        return Response(await page(), headers={"content-type": CONTENT_TYPE})

    return routes
