"""Which folders and Hub repos adapters may come from, links followed first."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lora_core.errors import ConfigError, InvalidAdapterPath

HUB = "hub:"
"""Begins a source that is a namespace of a Hub (`hub:org`, `hub:org/*`) or one of its repos (`hub:org/name`)."""

_NAMESPACE = re.compile(r"(?P<org>[A-Za-z0-9][\w.-]*)(?:/(?:\*|(?P<name>[A-Za-z0-9][\w.-]*)))?", re.ASCII)
_REPO = re.compile(r"(?P<org>[A-Za-z0-9][\w.-]*)/(?P<name>[A-Za-z0-9][\w.-]*)(?:@.+)?", re.ASCII)

SHOWN_PATH = 200
"""Characters of a path that a refusal repeats."""


class _Repos(NamedTuple):
    org: str
    name: str | None
    """None: all of the namespace's."""


class AdapterSources:
    """Places that adapters may come from: folders with all below them, and namespaces or repos of a Hub.

    What is below a root is decided by where links lead, for a folder and for each file in it. Paths are compared as
    they are on the machine that asks.

    Args:
        allowed: Each an absolute folder, `hub:org` or `hub:org/name`.
        setting: The setting that says so, for refusals.

    Raises:
        ConfigError: one is neither.
    """

    def __init__(self, allowed: Iterable[str], setting: str) -> None:
        self._allowed = tuple(allowed)
        self._setting = setting
        self._roots: list[str] = []
        self._repos: list[_Repos] = []
        for source in self._allowed:
            if source.startswith(HUB):
                self._repos.append(_repos(source))
            else:
                self._roots.append(_root(source))

    def locate(self, source: str) -> str:
        """Check what somebody asks to load, before anything of it is read.

        Args:
            source: A folder, or a repo as `org/name` or `org/name@revision`.

        Returns:
            The folder without links, or the repo as it was given: what a load is to name.

        Raises:
            InvalidAdapterPath: it is elsewhere, or a file in the folder is. Whether there is anything is not told.
        """
        folder = _real(source)
        if folder is not None and self._holds(folder):
            self._check_files(folder)
            return folder
        if self.allows_repo(source) and not os.path.lexists(os.path.expanduser(source)):
            return source
        raise self._refusal(source)

    def check_folder(self, source: str, folder: Path) -> None:
        """Check a folder where it is about to be read.

        Args:
            source: How the load names it. It must be the folder itself: a link in its place was put there since the
                load was allowed, or hides from whoever allows loads what it leads to.
            folder: Where that leads.

        Raises:
            InvalidAdapterPath: it is elsewhere, or a file in it is, or it is named by a link.
        """
        if not self._holds(str(folder)):
            raise self._refusal(source)
        if os.path.normpath(os.path.expanduser(source)) != str(folder):
            raise InvalidAdapterPath(
                f"{_shown(source)} is, or goes through, a symbolic link; name the folder that it leads to"
            )
        self._check_files(str(folder))

    def check_repo(self, repo_id: str) -> None:
        """Check a repo of the Hub. Raises InvalidAdapterPath."""
        if not self.allows_repo(repo_id):
            raise self._refusal(repo_id)

    def allows_repo(self, source: str) -> bool:
        """Whether this is a repo, with a revision or without, that adapters may come from."""
        repo = _REPO.fullmatch(source)
        if repo is None:
            return False
        return any(repo["org"] == org and name in (None, repo["name"]) for org, name in self._repos)

    def includes(self, source: str) -> bool:
        """Whether all that another allowed source lets in is let in here, too."""
        if source.startswith(HUB):
            wanted = _repos(source)
            return any(wanted.org == org and name in (None, wanted.name) for org, name in self._repos)
        return self._holds(os.path.realpath(_root(source)))

    def _holds(self, folder: str) -> bool:
        return any(_is_below(folder, os.path.realpath(root)) for root in self._roots)

    def _check_files(self, folder: str) -> None:
        try:
            names = [entry.name for entry in os.scandir(folder) if not entry.is_dir(follow_symlinks=False)]
        except OSError:
            # Nothing there, or nothing that may be read: whoever reads it says so.
            return
        for name in names:
            if not self._holds(os.path.realpath(os.path.join(folder, name))):
                raise InvalidAdapterPath(
                    f"{_shown(name)} in the adapter's folder is a link that leads out of the folders adapters may "
                    "come from; put the file itself there"
                )

    def _refusal(self, source: str) -> InvalidAdapterPath:
        allowed = ", ".join(self._allowed) or "nowhere"
        return InvalidAdapterPath(
            f"adapters may not come from {_shown(source)}, links followed; allowed: {allowed} "
            f"({self._setting}, which the operator of this server can change)"
        )


def _root(source: str) -> str:
    root = os.path.expanduser(source)
    if not os.path.isabs(root) or "\0" in root:
        raise ConfigError(f"{source!r} is no place for adapters; expected an absolute folder, hub:org or hub:org/name")
    return root


def _repos(source: str) -> _Repos:
    found = _NAMESPACE.fullmatch(source[len(HUB) :])
    if found is None:
        raise ConfigError(f"{source!r} is no place for adapters; expected hub:org or hub:org/name")
    return _Repos(found["org"], found["name"])


def _real(source: str) -> str | None:
    """Where a path leads; None for what can be no path."""
    if "\0" in source or not source.strip():
        return None
    try:
        return os.path.realpath(os.path.expanduser(source))
    except (OSError, ValueError):
        return None


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= SHOWN_PATH else repr(text[:SHOWN_PATH]) + "..."
