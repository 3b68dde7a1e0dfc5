"""The `access` section: whose keys open the server, what each tenant may use, and how large a body may be."""

import os
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from cluster.callers import TENANT_NAME
from lora_core.config import Settings
from lora_core.sources import AdapterSources

KEYS_VARIABLE = "LORA_FLEET_KEYS"


def _tenant_name(name: str) -> str:
    if TENANT_NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name!r} cannot name a tenant; expected small letters, digits, - and _, at most 63, and not 'operator'"
        )
    return name


TenantName = Annotated[str, AfterValidator(_tenant_name)]


class TenantSettings(Settings):
    """One entry of `access.tenants`: the quotas of a tenant, and where its adapters may come from."""

    requests_per_minute: int | None = Field(default=None, ge=1, description="Requests of any kind; unset: no limit.")
    tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of prompts and answers; unset: no limit. An answer that has begun is never cut for it.",
    )
    concurrent_requests: int | None = Field(default=None, ge=1, description="Requests at a time; unset: no limit.")
    adapters: int | None = Field(
        default=None, ge=0, description="Adapters that the tenant's own operator key may have loaded; unset: no limit."
    )
    pinned_slots: int = Field(
        default=0, ge=0, description="Adapters that the tenant's own operator key may keep pinned in slots."
    )
    sources: tuple[str, ...] = Field(
        default=(),
        description=(
            "Where adapters may come from that the tenant's own operator key loads, as in lora_config.sources, within "
            "which they lie. Empty: it can load none."
        ),
    )

    @model_validator(mode="after")
    def _sources_are_places(self) -> "TenantSettings":
        AdapterSources(self.sources, "sources")
        return self


def _absolute(path: str) -> str:
    if not os.path.isabs(os.path.expanduser(path)):
        raise ValueError(f"{path!r} is relative, and processes on several machines read it; write an absolute path")
    return path


class AccessSettings(Settings):
    """The `access` section. Keys themselves never stand in a configuration: a file or the environment has them."""

    keys_file: Annotated[str, AfterValidator(_absolute)] | None = Field(
        default=None,
        description=(
            "File of keys on the machines that run the ingress, `who=key` in each line, who being `operator`, a "
            "tenant, or `tenant:operator`. It is read again when it changes."
        ),
    )
    keys_variable: str = Field(
        default=KEYS_VARIABLE,
        min_length=1,
        description="Environment variable of the ingress that may hold keys, too, with commas or newlines between.",
    )
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024, description="Largest body of a request; larger ones: 413.")
    tenants: dict[TenantName, TenantSettings] = Field(
        default={}, description="Name of each tenant, and its quotas. Adapters called `name/...` are its own."
    )
