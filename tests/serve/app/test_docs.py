"""Every command and program in the pages works beside the real server, and each page leaves the fleet as it was."""

from pathlib import Path

import httpx
import pytest

from deployments.launcher import Served
from tests.docs.fences import PAGES, Fence, fences
from tests.docs.run_blocks import Reader, is_run

RUN = {page: [fence for fence in fences(page) if is_run(fence)] for page in PAGES}


@pytest.fixture(scope="module")
def reader(served: Served) -> Reader:
    return Reader.beside(served.url, served.cluster.address)


def catalogue(served: Served) -> object:
    """What the fleet serves: adapters with what was asked for beside, and aliases."""
    adapters = httpx.get(f"{served.url}/v1/adapters").json()["data"]
    aliases = httpx.get(f"{served.url}/v1/lora_aliases").json()
    asked = {one["name"]: (one["path"], one["pinned"], one["min_copies"]) for one in adapters}
    return asked, aliases


@pytest.mark.parametrize("page", [page for page, blocks in RUN.items() if blocks], ids=lambda page: page.name)
def test_a_page_can_be_followed(page: Path, reader: Reader, served: Served) -> None:
    before = catalogue(served)
    for fence in RUN[page]:
        fault = reader.follow(fence)
        assert fault is None, f"{fence.place}: {fault}"
    assert catalogue(served) == before, "what a page loads, pins or points to it takes back"


def test_a_block_that_fails_is_seen(reader: Reader) -> None:
    def fault(kind: str, text: str) -> str | None:
        return reader.follow(Fence("page.md", 1, kind, (), text))

    assert "status 5" in str(fault("sh", "lora-fleet unload nobody\n"))
    assert "ValueError" in str(fault("python", "raise ValueError('no')\n"))
    assert "and printed" in str(fault("console", "$ echo one\ntwo\n"))
    assert fault("console", "$ echo one \\\n  and two\none ... two\n$ echo three\nthree\n") is None
