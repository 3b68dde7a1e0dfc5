"""Where the server's keys are read from, and read again when they change."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from cluster.access import AccessSettings
from cluster.callers import Caller
from cluster.keys import KeyRing, KeyText, read_keys
from lora_core.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
"""How often a file of keys is looked at."""


class KeyStore:
    """The keys of `access.keys_file` and `access.keys_variable`, as they are now.

    Args:
        settings: Of the configuration.
        environment: Variables by name.
        clock: Seconds, monotonic.

    Raises:
        ConfigError: the file cannot be read or has faults, or tenants are configured and there is no key.
    """

    def __init__(
        self,
        settings: AccessSettings,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._environment = environment
        self._clock = clock
        self._looked_at = clock()
        self._seen = self._signature()
        self._ring = self._read()

    @property
    def is_empty(self) -> bool:
        """Whether the server has no keys; that does not change while it runs."""
        return self._ring.is_empty

    def caller(self, key: str) -> Caller | None:
        """Whose key this is; None where it is nobody's."""
        self._look()
        return self._ring.caller(key)

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at, found = now, self._signature()
        if found == self._seen:
            return
        self._seen = found
        try:
            ring = self._read()
            if ring.is_empty:
                raise ConfigError("no keys are left")
        except ConfigError as error:
            logger.error("the keys of before go on being used: %s", error)
            return
        logger.warning("the keys have changed: those of now are used")
        self._ring = ring

    def _signature(self) -> tuple[int, int, int] | None:
        """What changes when the file does."""
        if self._settings.keys_file is None:
            return None
        try:
            status = Path(self._settings.keys_file).expanduser().stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> KeyRing:
        tenants = self._settings.tenants
        ring = read_keys(self._texts(), tenants)
        if ring.is_empty and (tenants or self._settings.keys_file is not None):
            raise ConfigError(
                f"there are no keys, in access.keys_file or the variable {self._settings.keys_variable}, while "
                "access.tenants or access.keys_file is set; put `operator=...` and a key for each tenant there"
            )
        return ring

    def _texts(self) -> Iterator[KeyText]:
        file, variable = self._settings.keys_file, self._settings.keys_variable
        if file is not None:
            try:
                yield KeyText(file, Path(file).expanduser().read_text("utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"access.keys_file: {file} cannot be read: {error}") from None
        if (text := self._environment.get(variable)) is not None:
            yield KeyText(f"the variable {variable}", text)
