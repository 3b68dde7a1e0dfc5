"""Where adapters come from: a local folder, or a Hugging Face repo fetched into the Hub's cache."""

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from lora_core.errors import InvalidAdapterPath
from lora_core.hub import HubRepos
from lora_core.sources import AdapterSources
from lora_core.types import ADAPTER_CONFIG_FILE

_REPO = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>.+))?", re.ASCII)

# What git allows in no name of a branch or tag; `..` would also lead out of the cache.
_NO_REVISION = re.compile(r"\.\.|//|^[/.-]|[/.]$|[\s\\~^:?*\[\x00-\x1f\x7f]|@\{")


class AdapterStore:
    """Finds the folder of an adapter.

    Thread-safe. Fetching waits for the network, shows its progress on a terminal or in the log, and honours
    `HF_HUB_OFFLINE`, `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN` or the token the Hub's login stored, `HF_HUB_ETAG_TIMEOUT`
    and `HF_HUB_DOWNLOAD_TIMEOUT` as the Hub's own tools do.
    """

    def __init__(
        self,
        allow_remote: bool,
        *,
        endpoint: str | None = None,
        cache_dir: Path | None = None,
        max_bytes: int | None = None,
        sources: Sequence[str] | None = None,
    ) -> None:
        """Set where adapters may come from.

        Args:
            allow_remote: Fetch from the Hub what is not a local folder; False refuses it.
            endpoint: URL of the Hub; None is the one of the environment.
            cache_dir: Where fetched files are kept; None is the Hub's cache.
            max_bytes: Refuse to fetch weight files that take more; None fetches any.
            sources: Places that adapters may come from, see `AdapterSources`; None is any.
        """
        self._allow_remote = allow_remote
        self._hub = HubRepos(endpoint=endpoint, cache_dir=cache_dir, max_bytes=max_bytes)
        self._sources = None if sources is None else AdapterSources(sources, "lora_config.sources")

    def resolve(self, source: str) -> Path:
        """The absolute folder of an adapter, symbolic links followed.

        Args:
            source: A local folder (`~` is the home of the server's user, and a relative path starts where the server
                was started), else `org/name` or `org/name@revision` on the Hub, a revision being a branch, a tag or a
                commit. A folder wins over a repo of the same spelling. Of a repo only `adapter_config.json` and the
                adapter's safetensors files in its top folder are fetched.

        Raises:
            InvalidAdapterPath: it is neither, remote sources are not allowed, or fetching failed. A fetch that failed
                leaves nothing that would be taken for an adapter, and a later one goes on from there.
        """
        if not source.strip():
            raise InvalidAdapterPath("the adapter's path is empty; expected a folder or a Hugging Face repo id")
        if "\0" in source:
            raise InvalidAdapterPath(f"the adapter's path {source!r} contains a NUL character")
        if (folder := _local_folder(source)) is not None:
            if self._sources is not None:
                self._sources.check_folder(source, folder)
            return folder
        repo = _REPO.fullmatch(source)
        if repo is None:
            raise InvalidAdapterPath(f"{source!r} does not exist; expected a folder with {ADAPTER_CONFIG_FILE}")
        if not self._allow_remote:
            raise InvalidAdapterPath(
                f"{source!r} is no folder here, and remote sources are off; "
                "set lora_config.allow_remote: true to fetch it from the Hugging Face Hub"
            )
        if self._sources is not None:
            self._sources.check_repo(repo["id"])
        revision = repo["revision"]
        if revision is not None and _NO_REVISION.search(revision):
            raise InvalidAdapterPath(f"{source!r}: {revision!r} is no name of a branch, a tag or a commit")
        try:
            return self._hub.fetch(repo["id"], revision).resolve()
        except InvalidAdapterPath as error:
            raise InvalidAdapterPath(f"{source!r} cannot be fetched: {error}") from error


def _local_folder(source: str) -> Path | None:
    """The folder at a path; None if there is nothing at all."""
    path = os.path.expanduser(source)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            raise InvalidAdapterPath(f"{source!r} is a link to {os.readlink(path)!r}, which does not exist") from None
        return None
    except OSError as error:
        shown = source if len(source) <= 200 else source[:200] + "…"
        raise InvalidAdapterPath(f"{shown!r} cannot be looked at: {os.strerror(error.errno or 0)}") from error
    if not stat.S_ISDIR(mode):
        raise InvalidAdapterPath(f"{source!r} is a file; expected the folder that holds {ADAPTER_CONFIG_FILE}")
    if not os.access(path, os.R_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise InvalidAdapterPath(f"{source!r} may not be read by the server's user (uid {os.geteuid()})")
    return Path(path).resolve()
