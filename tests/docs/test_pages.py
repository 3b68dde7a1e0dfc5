"""The pages hold together: every block says what it is, what they show exists, and links lead somewhere."""

import json
import re
from pathlib import Path

import pytest

from tests.docs import exempt
from tests.docs.configurations import yaml_fault
from tests.docs.excerpts import diff_faults, excerpt_faults
from tests.docs.exempt import MOST, REASONS, reason
from tests.docs.fences import KINDS, PAGES, ROOT, Fence, every_fence, headings, indented_blocks, links
from tests.docs.run_blocks import is_run

FENCES = every_fence()


def of_kind(kind: str) -> list[Fence]:
    return [fence for fence in FENCES if fence.kind == kind]


def test_every_block_says_what_it_is() -> None:
    unknown = [fence.place for fence in FENCES if fence.kind not in KINDS]
    assert not unknown, f"expected one of {', '.join(KINDS)} behind the fences at {unknown}"
    indented = [place for page in PAGES for place in indented_blocks(page)]
    assert not indented, f"blocks without a fence: {indented}"


def test_few_commands_are_not_run_and_each_says_why() -> None:
    blocks = of_kind("sh")
    assert all(len(block.words) <= 1 for block in blocks)
    unknown = {word for block in blocks for word in block.words} - REASONS.keys()
    assert not unknown, f"found {unknown} behind ```sh, expected one of {', '.join(REASONS)}"
    exempt = [block.place for block in blocks if reason(block) is not None]
    assert len(exempt) <= MOST, exempt
    run = [block.place for block in FENCES if is_run(block)]
    assert len(exempt) < len(run), f"most blocks are run; {run} are"


@pytest.mark.parametrize("fence", [one for one in of_kind("sh") if reason(one)], ids=lambda fence: fence.place)
def test_what_commands_that_are_not_run_name_exists(fence: Fence) -> None:
    assert list(exempt.faults(fence)) == []


@pytest.mark.parametrize("fence", of_kind("yaml"), ids=lambda fence: fence.place)
def test_configurations_are_right(fence: Fence, tmp_path: Path) -> None:
    assert yaml_fault(fence, tmp_path) is None


def test_metrics_that_the_pages_name_are_described() -> None:
    described = (ROOT / "docs" / "metrics.md").read_text()
    for page in PAGES:
        for name in re.findall(r"`((?:lora_fleet_|vllm:)\w+)`", page.read_text()):
            assert f"`{name}`" in described, f"{page.name} names {name}"


def test_json_is_json() -> None:
    for fence in of_kind("json"):
        assert json.loads(fence.text) is not None, fence.place


def test_what_is_shown_of_the_code_is_there() -> None:
    changes, excerpts = of_kind("diff"), [fence for fence in of_kind("python") if not fence.is_plain]
    assert changes, "docs/architectures.md has some"
    assert excerpts, "docs/architectures.md has one"
    faults = [*map(diff_faults, changes), *map(excerpt_faults, excerpts)]
    assert [fault for some in faults for fault in some] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not heading or heading in headings(target), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "docs"], ids=lambda page: page.name)
def test_every_page_can_be_found(page: Path) -> None:
    start = (ROOT / "README.md").resolve()
    seen, found = {start}, [start]
    while found:
        here = found.pop()
        for link in links(here):
            target = (here.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.exists() and target not in seen:
                seen.add(target)
                found.append(target)
    assert page.resolve() in seen, "no link leads here from README.md"


def test_files_that_the_pages_name_exist() -> None:
    named = re.compile(r"`((?:tests|cluster|docs|kernels|deployments|lora_core)/[\w/.-]+)`")
    for page in PAGES:
        for path in named.findall(page.read_text()):
            assert (ROOT / path).exists(), f"{page.name} names {path}"
