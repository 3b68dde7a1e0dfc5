"""YAML in the pages: whole configurations, and parts of one put into `cluster/config.yaml`."""

import copy
from pathlib import Path
from typing import Any

import yaml

from cluster.schema import AppSettings
from deployments.serve_config import read_serve_config
from lora_core.errors import ConfigError
from tests.docs.fences import ROOT, Fence

CONFIG = ROOT / "cluster" / "config.yaml"


def yaml_fault(fence: Fence, folder: Path) -> str | None:
    """What the schema says against a block: one of the sections of `args`, deployments, or the whole."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(completed(yaml.safe_load(fence.text))))
    try:
        read_serve_config(path)
    except ConfigError as error:
        return str(error)
    return None


def completed(part: Any) -> dict[str, Any]:
    """A configuration with a part of one put into it; keys that are no part's are left for the schema to refuse."""
    whole: dict[str, Any] = copy.deepcopy(yaml.safe_load(CONFIG.read_text()))
    (application,) = whole["applications"]
    if isinstance(part, list):
        application["deployments"] = part
    elif "applications" in part:
        return dict(part)
    elif part.keys() & AppSettings.model_fields.keys():
        application["args"].update({name: merged(application["args"].get(name), part[name]) for name in part})
    else:
        whole.update(part)
    return whole


def merged(old: Any, new: Any) -> Any:
    """A section with some of its settings changed."""
    return {**old, **new} if isinstance(old, dict) and isinstance(new, dict) else new
