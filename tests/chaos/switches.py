"""`Switches`: how the one who inflicts faults reaches processes of the fleet, by files in a folder."""

import contextlib
import os
from pathlib import Path

VARIABLE = "LORA_FLEET_CHAOS"
"""Names the folder, in the environment of every process of the fleet."""


class Switches:
    """Faults that are on, each a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def of_this_process(cls) -> "Switches":
        """Those of the fleet this process belongs to."""
        return cls(Path(os.environ[VARIABLE]))

    def turn_on(self, name: str, text: str = "") -> None:
        """Turn a fault on; the text says what exactly."""
        (self._folder / name).write_text(text)

    def turn_off(self, name: str) -> None:
        """Turn it off, if it is on."""
        (self._folder / name).unlink(missing_ok=True)

    def text(self, name: str) -> str | None:
        """What a fault that is on says; None while it is off."""
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / name).read_text()
        return None

    def take(self, name: str) -> bool:
        """Turn a fault off; True for the one process that did."""
        try:
            (self._folder / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def is_on(self, name: str) -> bool:
        """Whether a fault is on."""
        return (self._folder / name).exists()
