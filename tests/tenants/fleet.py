"""A real fleet with two tenants: a tiny model on two replicas, keys in a file, adapters in folders of their own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import yaml

from deployments.launcher import deployed
from deployments.local_cluster import free_port
from tests.engine.byte_model import byte_model
from tests.factories import make_adapter

CONFIG = Path(__file__).parents[2] / "cluster" / "config.yaml"
BASE = "tiny"

KEYS = {
    "operator": "fleet-operator-0123456789",
    "acme": "acme-user-0123456789abcdef",
    "acme:operator": "acme-operator-0123456789a",
    "globex": "globex-user-0123456789abcd",
    "globex:operator": "globex-operator-012345678",
    "initech": "initech-user-0123456789abc",
}

SECRET = "globex/zebra-7f3a"
"""An adapter of the other tenant."""
SECRET_FOLDER = "vault-91c2"
"""Where it lies."""
CANARIES = ("zebra", "vault-91c2", "globex", "initech")
"""What no answer to acme may hold that acme has not sent itself."""

MAX_ADAPTERS = 3
MAX_BODY_BYTES = 262_144
RATE = 30
"""Requests per minute of the tenant whose rate is tried."""


class TenantFleet(NamedTuple):
    """The running application, and where its adapters lie."""

    url: str
    root: Path
    """Has folders `acme`, `globex` and `shared`."""
    log_folder: Path
    """What its processes write."""

    def client(self, who: str | None = None, key: str | None = None) -> httpx.AsyncClient:
        """A client with somebody's key, with a given one, or without any."""
        key = KEYS[who] if who is not None else key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=32)
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=120, limits=limits)


@contextmanager
def tenant_fleet(folder: Path) -> Iterator[TenantFleet]:
    """Deploy it, with all it needs below `folder`."""
    folder = folder.resolve()
    base, root = byte_model(folder / "base"), folder / "adapters"
    names = ("acme/own", "acme/second", "acme/spare", f"globex/{SECRET_FOLDER}", "shared/common")
    for seed, name in enumerate(names):
        make_adapter(base, root / name, r=4, targets=("q_proj", "v_proj"), seed=seed)
    _add_tricks(root)
    keys = folder / "keys"
    keys.write_text("".join(f"{who}={key}\n" for who, key in KEYS.items()))
    keys.chmod(0o600)
    content = yaml.safe_load(CONFIG.read_text())
    content["applications"][0]["args"] = {
        "model": str(base),
        "model_name": BASE,
        "engine": {"dtype": "float32", "device": "cpu", "kv_cache_tokens": 4096, "num_threads": 1},
        "lora_config": {
            "enable_lora": True,
            "max_num_loras": 4,
            "max_lora_rank": 8,
            "sources": [str(root), "hub:acme-org"],
            "lora_paths": [
                f"common={root}/shared/common", f"acme/own={root}/acme/own", f"{SECRET}={root}/globex/{SECRET_FOLDER}",
            ],
        },
        "access": {
            "keys_file": str(keys),
            "max_body_bytes": MAX_BODY_BYTES,
            "tenants": {
                "acme": {
                    "adapters": MAX_ADAPTERS, "pinned_slots": 1, "sources": [str(root / "acme"), "hub:acme-org"],
                },
                "globex": {"pinned_slots": 2, "sources": [str(root / "globex")]},
                "initech": {"requests_per_minute": RATE, "tokens_per_minute": 1000},
            },
        },
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    with deployed(path, port=free_port(), num_cpus=4, report=lambda line: print(line, file=sys.stderr)) as served:
        yield TenantFleet(served.url, root, served.cluster.folder)


def _add_tricks(root: Path) -> None:
    """Links in acme's folder that lead to the other tenant's."""
    secret = root / "globex" / SECRET_FOLDER
    (root / "acme" / "link").symlink_to(secret)
    (root / "acme" / "up").symlink_to(root)
    (root / "acme" / "relative").symlink_to(Path("..") / "globex" / SECRET_FOLDER)
    (root / "acme" / "chain").symlink_to(root / "acme" / "link")
    (root / "acme" / "dangling").symlink_to(root / "globex" / "absent")
    half = root / "acme" / "half"
    half.mkdir()
    (half / "adapter_config.json").write_bytes((root / "acme" / "own" / "adapter_config.json").read_bytes())
    (half / "adapter_model.safetensors").symlink_to(secret / "adapter_model.safetensors")
