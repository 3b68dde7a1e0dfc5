"""The tokens with which a model ends an answer."""

from pathlib import Path

from transformers import AutoConfig, GenerationConfig


def eos_token_ids(folder: Path) -> frozenset[int]:
    """The ids that end an answer: those of generation_config.json, or else of config.json; there may be none."""
    found: int | list[int] | None = None
    if (folder / "generation_config.json").exists():
        found = GenerationConfig.from_pretrained(folder).eos_token_id
    if found is None:
        found = AutoConfig.from_pretrained(folder).eos_token_id
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)
