"""`docs/configuration.md` says what the schema says."""

from pathlib import Path

from pydantic import BaseModel

from cluster.configuration_page import page
from cluster.schema import AppSettings

WRITTEN = Path(__file__).parents[2] / "docs" / "configuration.md"


def sections(section: type[BaseModel]) -> list[type[BaseModel]]:
    """A section and all within it."""
    inner = [field.annotation for field in section.model_fields.values()]
    found = [one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)]
    return [section, *(deeper for one in found for deeper in sections(one))]


def test_the_page_is_that_of_the_schema() -> None:
    assert WRITTEN.read_text() == page(), "run `make configuration-page`"


def test_every_field_is_explained() -> None:
    for section in sections(AppSettings):
        for name, field in section.model_fields.items():
            is_section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
            assert is_section or field.description, f"{section.__name__}.{name} has no description"
            assert f"`{name}`" in page() or is_section
