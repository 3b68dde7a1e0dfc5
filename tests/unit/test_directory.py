"""Which adapter a model name leads to, by the table of a real router."""

from collections import Counter

import pytest

from deployments.directory import Model, ModelDirectory
from lora_core.errors import AdapterNotFound
from tests.unit.router_fleet import Replica, fleet, make_router


async def nowhere() -> str:
    raise AssertionError("no replica is asked: the table says it all")


async def test_names_versions_and_aliases_lead_to_adapters() -> None:
    router, directory = make_router(), ModelDirectory("base", nowhere)
    async with fleet(router, Replica(router, "r0")):
        epochs = {name: (await router.load(name, f"/{name}")).epoch for name in ("tuned@1", "tuned@2", "plain")}
        await router.set_alias("tuned", {"tuned@1": 3, "tuned@2": 1})
        directory._take(await router.table())
        assert await directory.resolve("base") == Model(None, 0)
        assert await directory.resolve("plain", "some request") == Model("plain", epochs["plain"])
        assert await directory.resolve("tuned@2") == Model("tuned@2", epochs["tuned@2"])
        found = [await directory.resolve("tuned", f"request {number}") for number in range(400)]
        counts = Counter(model.lora_name for model in found)
        assert counts.keys() == {"tuned@1", "tuned@2"}
        assert 0.65 < counts["tuned@1"] / 400 < 0.85
        assert all(model.epoch == epochs[str(model.lora_name)] for model in found)
        assert found == [await directory.resolve("tuned", f"request {number}") for number in range(400)]
        await router.set_alias("tuned", {"tuned@2": 1})
        directory._take(await router.table())
        assert {(await directory.resolve("tuned", f"request {number}")).lora_name for number in range(50)} == {
            "tuned@2"
        }


async def test_an_unknown_name_is_told_what_there_is_but_not_without_end() -> None:
    router, directory = make_router(), ModelDirectory("base", nowhere)
    async with fleet(router, Replica(router, "r0")):
        for number in range(30):
            await router.load(f"a{number:02}", "/a")
        directory._take(await router.table())
        with pytest.raises(
            AdapterNotFound, match=r"model 'a99' does not exist; known models: base, a00, .* and 10 more"
        ):
            await directory.resolve("a99")
