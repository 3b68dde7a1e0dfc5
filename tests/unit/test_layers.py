"""Imports run one way: kernels <- lora_core <- cluster <- deployments, and only deployments knows Ray and HTTP."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("kernels", "lora_core", "cluster", "deployments")
DEPLOYMENTS_ONLY = ("ray", "fastapi", "starlette")


def imported_packages(source: str) -> Iterator[str]:
    """Top-level package of every absolute import, inside functions and type-checking blocks too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]


def forbidden_imports(layer: str, source: str) -> list[str]:
    """Packages that a file of `layer` imports and must not."""
    above = LAYERS[LAYERS.index(layer) + 1 :]
    forbidden = {*above, "tests", *(() if layer == "deployments" else DEPLOYMENTS_ONLY)}
    return sorted(forbidden.intersection(imported_packages(source)))


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_run_one_way(layer: str) -> None:
    files = sorted((ROOT / layer).rglob("*.py"))
    assert files
    faults = {str(path.relative_to(ROOT)): forbidden_imports(layer, path.read_text()) for path in files}
    assert {path: found for path, found in faults.items() if found} == {}


@pytest.mark.parametrize(
    ("layer", "source", "found"),
    [
        ("kernels", "from lora_core.types import AdapterRef", ["lora_core"]),
        ("lora_core", "def f() -> None:\n    import ray.serve", ["ray"]),
        ("lora_core", "import kernels, torch", []),
        ("cluster", "from starlette.requests import Request", ["starlette"]),
        ("cluster", "import deployments.app as app", ["deployments"]),
        ("deployments", "import ray\nfrom cluster import placement", []),
        ("deployments", "from tests.factories import tiny_llama", ["tests"]),
        ("lora_core", "from . import types", []),
        ("lora_core", "import rays_of_light", []),
    ],
)
def test_a_forbidden_import_is_seen(layer: str, source: str, found: list[str]) -> None:
    assert forbidden_imports(layer, source) == found
