"""The live page's document and routes: it loads nothing, runs its own script alone, and operators alone get events."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from deployments.fleet_page import FleetPage
from tests.unit.gated_fleet import Connect, Fleet, connector


class Document(HTMLParser):
    """Its elements and the text of some."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: dict[str, str] = {}
        self._tag = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if self._tag in ("script", "style", "title"):
            self.texts[self._tag] = self.texts.get(self._tag, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""


@pytest.fixture(scope="module")
def page() -> FleetPage:
    return FleetPage()


def directives(page: FleetPage) -> dict[str, str]:
    parts = (part.partition(" ") for part in page.headers["Content-Security-Policy"].split("; "))
    return {name: value for name, _, value in parts}


def test_its_own_script_and_style_may_run_and_no_others(page: FleetPage) -> None:
    found, policy = Document(page.html), directives(page)
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(found.texts[tag].encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert (policy["default-src"], policy["form-action"], policy["frame-ancestors"]) == ("'none'",) * 3
    assert page.html.count("<script") == page.html.count("<style") == 1
    assert len(found.texts["script"]) > 1000, "it is all there"


def test_nothing_is_loaded_and_nothing_is_parsed_from_text(page: FleetPage) -> None:
    found = Document(page.html)
    assert [item for item in found.attributes if item[1] in ("src", "srcset", "action", "style")] == []
    assert [item for item in found.attributes if item[1].startswith("on")] == []
    links = [value for tag, name, value in found.attributes if name == "href"]
    assert links == ["data:,", "#replicas-title"]
    assert re.findall(r"https?:|//\w|url\(|@import", page.html) == []
    ways = r"(inner|outer)HTML|insertAdjacent|document\.write|eval\(|Function\(|setAttribute|location|\bimport\b"
    assert re.findall(ways, found.texts["script"]) == []


@pytest.fixture
def connect() -> Connect:
    return connector(Fleet())


@pytest.mark.parametrize("who", [None, "acme", "acme:operator", "operator"])
async def test_the_page_is_everyones_and_the_events_the_operators(
    connect: Connect, page: FleetPage, who: str | None
) -> None:
    async with connect(who) as client:
        answer = await client.get("/fleet")
        assert (answer.status_code, answer.text) == (200, page.html)
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["content-security-policy"] == page.headers["Content-Security-Policy"]
        head = await client.head("/fleet")
        assert (head.status_code, head.text) == (200, "")
        expected = 200 if who == "operator" else 401 if who is None else 403
        for method in ("GET", "HEAD"):
            answer = await client.request(method, "/v1/fleet/events")
            assert answer.status_code == expected
        assert (await client.post("/fleet")).status_code in (401, 403, 404, 405)
        if who == "operator":
            answer = await client.get("/v1/fleet/events")
            assert (answer.text, answer.headers["cache-control"]) == ("data: {}\n\n", "no-store")
            assert answer.headers["content-type"].startswith("text/event-stream")


async def test_no_key_is_read_from_an_address(connect: Connect) -> None:
    async with connect() as client:
        for query in ("key", "api_key", "token", "access_token"):
            answer = await client.get("/v1/fleet/events", params={query: "operator-key-00000"})
            assert answer.status_code == 401
        cookies = {"Cookie": "key=operator-key-00000"}
        assert (await client.get("/v1/fleet/events", headers=cookies)).status_code == 401
