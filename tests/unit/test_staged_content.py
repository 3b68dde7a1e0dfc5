"""Content that is in memory under one name is loaded under another without reading its files again."""

import shutil
from pathlib import Path

from lora_core.types import LoRAStatus
from tests.unit.adapted_model import make_manager, random_pairs, save_adapter

STAGED = "a\x1freplacement"


def test_a_replacement_that_was_staged_under_another_name_is_read_once(tmp_path: Path) -> None:
    manager = make_manager()
    folder = save_adapter(tmp_path / "a", random_pairs(0, 2), 4.0)
    manager.load_adapter(f"a={folder}", generation=1)
    manager.pin_adapter("a")
    old = manager.acquire("a")
    save_adapter(tmp_path / "a", random_pairs(1, 2), 4.0)
    staged = manager.load_adapter(f"{STAGED}={folder}", generation=2)
    assert staged.report is not None
    num_reads = manager.num_file_reads
    # What the folder holds by now does not matter: every replica has checked the content it is to serve.
    save_adapter(tmp_path / "a", random_pairs(2, 2), 4.0)
    swapped = manager.load_adapter(f"a={folder}", generation=3, replace=True, content_hash=staged.report.content_hash)
    assert swapped.status is LoRAStatus.SUCCESS, swapped.message
    assert swapped.report is not None
    assert (swapped.report.generation, swapped.report.content_hash) == (3, staged.report.content_hash)
    assert manager.num_file_reads == num_reads
    assert manager.unload_adapter(STAGED).status is LoRAStatus.SUCCESS
    new = manager.acquire("a")
    assert (old.generation, new.generation) == (1, 3)
    assert manager.is_pinned(new)
    assert manager.activate_adapter(new) != manager.activate_adapter(old)
    manager.check()
    manager.release(old)
    manager.release(new)
    manager.check()


def test_content_that_is_nowhere_in_memory_must_be_in_the_folder(tmp_path: Path) -> None:
    manager = make_manager()
    folder = save_adapter(tmp_path / "a", random_pairs(0, 2), 4.0)
    first = manager.load_adapter(f"a={folder}")
    assert first.report is not None
    content_hash = first.report.content_hash
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert manager.load_adapter(f"b={copy}", content_hash=content_hash).status is LoRAStatus.SUCCESS
    assert manager.loras["b"].path == copy
    for name in "ab":
        manager.unload_adapter(name)
    save_adapter(tmp_path / "a", random_pairs(1, 2), 4.0)
    refused = manager.load_adapter(f"a={folder}", content_hash=content_hash)
    assert refused.status is LoRAStatus.LOAD_INVALID_ADAPTER
    assert content_hash[:12] in refused.message
