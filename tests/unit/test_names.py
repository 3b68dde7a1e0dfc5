"""Names adapters may have, and `lora_paths` read into them."""

import pytest

from cluster.names import MAX_NAME_LENGTH, check_name, static_adapters
from lora_core.errors import AdapterNameTaken, ConfigError, InvalidAdapter


@pytest.mark.parametrize("name", ["pirate", "org/adapter@v2", "größe 7", "a:b", "x" * MAX_NAME_LENGTH])
def test_good_names_pass(name: str) -> None:
    check_name(name, "base")


@pytest.mark.parametrize(
    ("name", "named"),
    [("", "empty"), (" ", "empty"), ("x" * 257, "257"), ("a\nb", "printed"), ("a\x00", "printed"), ("a=b", "'='")],
)
def test_bad_names_are_refused_with_the_reason(name: str, named: str) -> None:
    with pytest.raises(InvalidAdapter, match=named):
        check_name(name, "base")


def test_the_base_models_name_is_taken() -> None:
    with pytest.raises(AdapterNameTaken, match="'base'"):
        check_name("base", "base")


def test_lora_paths_are_read() -> None:
    assert static_adapters(["a=/x", "/y", "a=/x"], "base") == {"a": "/x", "/y": "/y"}


@pytest.mark.parametrize("paths", [["a="], ["a=/x", "a=/y"], ["base=/x"], ["=/x"]])
def test_lora_paths_that_cannot_work_are_refused(paths: list[str]) -> None:
    with pytest.raises(ConfigError, match="lora_paths"):
        static_adapters(paths, "base")
