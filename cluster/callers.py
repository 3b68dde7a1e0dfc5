"""Who is asking, and which adapters that concerns."""

import re
from dataclasses import dataclass

TENANT_NAME = re.compile(r"(?!operator$)[a-z0-9][a-z0-9_-]{0,62}")
"""Names of tenants: short, and safe in names of adapters, settings and logs."""


def owner_of(adapter: str) -> str | None:
    """The tenant an adapter's name belongs to: what stands before its first slash; None where all share it.

    A name may begin with what is no tenant's: then it belongs to nobody, and only the fleet's operator sees it. So a
    tenant that is taken out of the configuration leaves nothing behind that others could see. It is nobody's, too,
    where it would be another one as a path: `acme/../x`.
    """
    parts = adapter.split("/")
    if len(parts) == 1:
        return None
    return "" if any(part in ("", ".", "..") for part in parts) else parts[0]


@dataclass(frozen=True)
class Caller:
    """Who a request is made for."""

    tenant: str | None = None
    """None: nobody's in particular."""
    is_operator: bool = False
    """May change adapters: its tenant's, or without a tenant all of the fleet's."""

    @property
    def is_fleet_operator(self) -> bool:
        """Whether everything is open to it."""
        return self.is_operator and self.tenant is None

    def may_see(self, adapter: str) -> bool:
        """Whether it may use an adapter of this name, and know of it."""
        if self.is_fleet_operator:
            return True
        return self.tenant is not None and owner_of(adapter) in (None, self.tenant)

    def owns(self, adapter: str) -> bool:
        """Whether adapters of this name are its tenant's own."""
        return self.tenant is not None and owner_of(adapter) == self.tenant


FLEET_OPERATOR = Caller(is_operator=True)
NOBODY = Caller()
"""Has no key."""
