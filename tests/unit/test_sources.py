"""Where adapters may come from: what is within, what is not, and how links are followed."""

import os
from pathlib import Path

import pytest

from lora_core.errors import ConfigError, InvalidAdapterPath
from lora_core.sources import AdapterSources
from lora_core.store import AdapterStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that adapters may come from, with one in it, and one beside it that is another's."""
    for name in ("mine/a", "other/secret"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    return tmp_path / "mine"


def sources_of(*allowed: Path | str) -> AdapterSources:
    return AdapterSources(map(str, allowed), "the.setting")


def test_folders_below_a_root_are_located_without_links(root: Path) -> None:
    sources = sources_of(root)
    (root / "link").symlink_to(root / "a")
    for source in (root / "a", root / "link", f"{root}/a/../a/", f"{root}//a"):
        assert sources.locate(str(source)) == str(root / "a")
    assert sources.locate(str(root / "absent")) == str(root / "absent"), "whoever reads it says that it is not there"


def test_a_root_may_be_a_link_itself(root: Path) -> None:
    (root.parent / "alias").symlink_to(root)
    assert sources_of(root.parent / "alias").locate(str(root.parent / "alias" / "a")) == str(root / "a")


@pytest.mark.parametrize(
    "spelling",
    [
        "{other}/secret", "{mine}/../other/secret", "{mine}/../mine2", "{mine}/out", "{mine}/out/secret", "/", "/etc",
        "", " ", ".", "..", "~", "mine/a", "\0", "{mine}/a\0", "file://{mine}/a", "{mine}%2fa", "org/name", "\udc80",
        "{mine}" + "/x" * 300 + "/.." * 301 + "/other", "{other}/absent",
    ],
)  # fmt: skip
def test_what_is_elsewhere_is_refused_in_the_same_words_whether_or_not_it_exists(root: Path, spelling: str) -> None:
    (root / "out").symlink_to(root.parent / "other")
    (root.parent / "mine2").mkdir()
    source = spelling.replace("{mine}", str(root)).replace("{other}", str(root.parent / "other"))
    if source == f"{root}%2fa":
        source = f"{root}%2f..%2fother"
    with pytest.raises(InvalidAdapterPath, match=r"adapters may not come from .*the\.setting") as caught:
        sources_of(root).locate(source)
    assert "exist" not in str(caught.value).replace(repr(source), "")


def test_a_file_that_leads_out_is_refused(root: Path) -> None:
    (root / "a" / "adapter_model.safetensors").symlink_to(root.parent / "other" / "secret" / "adapter_config.json")
    with pytest.raises(InvalidAdapterPath, match=r"adapter_model\.safetensors.* leads out"):
        sources_of(root).locate(str(root / "a"))


def test_repos_are_allowed_by_namespace_or_name() -> None:
    sources = sources_of("hub:org", "hub:other/one")
    for repo in ("org/a", "org/a@main", "other/one", "other/one@abc"):
        assert sources.locate(repo) == repo
    for repo in ("org", "Org/a", "org2/a", "other/two", "other/one/more", "org/../x", "org/a/b", "@org/a"):
        with pytest.raises(InvalidAdapterPath):
            sources.locate(repo)


def test_a_folder_wins_over_a_repo_of_the_same_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "a").mkdir(parents=True)
    with pytest.raises(InvalidAdapterPath):
        sources_of("hub:org").locate("org/a")


@pytest.mark.parametrize("source", ["relative/folder", "", "hub:", "hub:a/b/c", "hub:-x", "a\0b"])
def test_what_is_no_place_is_a_fault_of_the_configuration(source: str) -> None:
    with pytest.raises(ConfigError, match="no place for adapters"):
        sources_of(source)


def test_sources_include_narrower_ones(root: Path) -> None:
    wide = sources_of(root.parent, "hub:org")
    assert all(wide.includes(source) for source in (str(root), "hub:org", "hub:org/*", "hub:org/a"))
    narrow = sources_of(root, "hub:org/a")
    assert not any(narrow.includes(source) for source in (str(root.parent), "hub:org", "hub:org/b", "hub:other"))


def test_the_store_opens_nothing_elsewhere(root: Path) -> None:
    store = AdapterStore(False, sources=[str(root)])
    assert store.resolve(str(root / "a")) == root / "a"
    with pytest.raises(InvalidAdapterPath, match="may not come from"):
        store.resolve(str(root.parent / "other" / "secret"))
    with pytest.raises(InvalidAdapterPath, match=r"may not come from .*org/name"):
        AdapterStore(True, sources=[str(root), "hub:other"]).resolve("org/name")


def test_the_store_follows_no_link_that_was_put_there_since_the_load_was_allowed(root: Path) -> None:
    allowed = sources_of(root).locate(str(root / "a"))
    os.rename(root / "a", root / "moved")
    (root / "b").mkdir()
    (root / "a").symlink_to(root / "b")
    with pytest.raises(InvalidAdapterPath, match="symbolic link"):
        AdapterStore(False, sources=[str(root)]).resolve(allowed)
