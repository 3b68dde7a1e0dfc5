"""Where in a YAML file something stands, so that what is wrong with it can be said with its line."""

from collections.abc import Iterator, Sequence

import yaml

Path = tuple[int | str, ...]
"""Keys and indices, from the top."""


class YamlLines:
    """The lines of a YAML text's keys and items, from 1.

    Raises:
        yaml.YAMLError: it is not YAML.
    """

    def __init__(self, text: str) -> None:
        self._root: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)

    def line(self, path: Sequence[int | str]) -> int:
        """The line of what is at `path`, or of the innermost thing on the way there where it is not in the file."""
        node, line = self._root, 1
        for part in path:
            found = _child(node, part)
            if found is None:
                break
            node, line = found
        return line

    def repeated_keys(self) -> list[Path]:
        """Keys that stand a second time in one mapping, where the first would count for nothing."""
        return [path for path, _ in _repeated((), self._root)]

    def line_of_repeated(self, path: Path) -> int:
        """The line of the second of two equal keys."""
        return dict(_repeated((), self._root))[path]


def _child(node: yaml.Node | None, part: int | str) -> tuple[yaml.Node, int] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return value, key.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        item = node.value[part]
        return item, item.start_mark.line + 1
    return None


def _repeated(path: Path, node: yaml.Node | None) -> Iterator[tuple[Path, int]]:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeated((*path, index), item)
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            where = (*path, key.value)
            if where in seen:
                yield where, key.start_mark.line + 1
            seen.add(where)
            yield from _repeated(where, value)
