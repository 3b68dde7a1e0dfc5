"""`docs/adapters.md` says of every field of PEFT's configuration what the code does with it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from deployments.http_errors import FAULTS
from lora_core.errors import InvalidAdapter
from lora_core.peft_config import read_peft_config
from lora_core.types import LoRAStatus
from tests.docs.fences import ROOT

PAGE = (ROOT / "docs" / "adapters.md").read_text()
FIELDS = PAGE.partition("### Fields of `adapter_config.json`")[2].partition("Other fields of")[0]
REFUSED = {name: json.loads(value) for name, value in re.findall(r"^\| `(\w+)` \| `(.+?)` \|", FIELDS, re.MULTILINE)}
PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
ANY: tuple[Any, ...] = (True, 3, "word", ["word"], {"word": 1}, {})


def refusal(folder: Path, **changed: Any) -> str | None:
    """What the code says against a configuration with some fields changed."""
    (folder / "adapter_config.json").write_text(json.dumps({**PLAIN, **changed}))
    try:
        read_peft_config(folder)
    except InvalidAdapter as error:
        return str(error)
    return None


def test_every_field_that_peft_writes_is_on_the_page() -> None:
    named = set(re.findall(r"`(\w+)`", FIELDS))
    assert set(LoraConfig().to_dict()) - named == set(), "what does the server do with these?"


@pytest.mark.parametrize(("field", "value"), REFUSED.items(), ids=REFUSED.keys())
def test_what_the_page_says_is_refused_is(field: str, value: Any, tmp_path: Path) -> None:
    assert field in str(refusal(tmp_path, **{field: value}))


def test_nothing_else_is_refused_as_a_variant(tmp_path: Path) -> None:
    for field in LoraConfig().to_dict():
        said = [refusal(tmp_path, **{field: value}) or "" for value in ANY]
        is_variant = any("not served" in one for one in said)
        assert not is_variant or field in REFUSED, f"{field}: {said}"


def test_fields_that_are_said_to_have_no_effect_have_none(tmp_path: Path) -> None:
    names = re.findall(r"`(\w+)`", FIELDS.partition("Without effect")[2])
    assert len(names) > 10
    for name in names:
        assert [refusal(tmp_path, **{name: value}) for value in ANY] == [None] * len(ANY), name


def test_answers_that_the_page_names_exist() -> None:
    assert set(re.findall(r"`(load_(?:invalid|name)_\w+)`", PAGE)) <= {status.value for status in LoRAStatus}
    codes = {fault.code for fault in FAULTS.values()}
    assert {"invalid_adapter_path", "invalid_adapter", "name_taken"} <= codes & set(re.findall(r"`(\w+)`", PAGE))
