"""`lora_core` gives every public name, and imports torch only for those that need it."""

import subprocess
import sys

import pytest

import lora_core


@pytest.mark.parametrize("name", lora_core.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(lora_core, name) is not None


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="frobnicate"):
        _ = lora_core.frobnicate


def test_message_types_come_without_torch() -> None:
    program = "import sys; from lora_core import LoRARequest, LoRAConfig; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
