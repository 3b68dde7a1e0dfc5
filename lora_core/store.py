"""Where adapters come from: a local folder, or a Hugging Face repo fetched into the Hub's cache."""

import logging
import os
import re
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from lora_core.errors import InvalidAdapterPath
from lora_core.types import ADAPTER_CONFIG_FILE

logger = logging.getLogger(__name__)

# Root files only: checkpoints in sub-folders, optimiser states and pickles stay where they are.
_WANTED = [ADAPTER_CONFIG_FILE, "*.safetensors", "*.safetensors.index.json"]
_UNWANTED = ["*/*"]

_REPO = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>.+))?", re.ASCII)


class AdapterStore:
    """Finds the folder of an adapter.

    Thread-safe. Fetching shows its progress on stderr, waits for the network, and honours `HF_HUB_OFFLINE`, `HF_HOME`,
    `HF_ENDPOINT` and `HF_TOKEN` as the Hub's own tools do.
    """

    def __init__(self, allow_remote: bool, *, endpoint: str | None = None, cache_dir: Path | None = None) -> None:
        """Set where adapters may come from.

        Args:
            allow_remote: Fetch from the Hub what is not a local folder; False refuses it.
            endpoint: URL of the Hub; None is the one of the environment.
            cache_dir: Where fetched files are kept; None is the Hub's cache.
        """
        self._allow_remote = allow_remote
        self._endpoint = endpoint
        self._cache_dir = cache_dir

    def resolve(self, source: str) -> Path:
        """The absolute folder of an adapter.

        Args:
            source: A local folder, else `org/name` or `org/name@revision` on the Hub. Of a repo only
                `adapter_config.json` and the safetensors files of its top folder are fetched.

        Raises:
            InvalidAdapterPath: it is neither, remote sources are not allowed, or fetching failed.
        """
        if not source.strip():
            raise InvalidAdapterPath("the adapter's path is empty; expected a folder or a Hugging Face repo id")
        if "\0" in source:
            raise InvalidAdapterPath(f"the adapter's path {source!r} contains a NUL character")
        if os.path.isdir(source):
            return Path(source).resolve()
        if os.path.exists(source):
            raise InvalidAdapterPath(f"{source!r} is a file; expected the folder that holds {ADAPTER_CONFIG_FILE}")
        repo = _REPO.fullmatch(source)
        if repo is None:
            raise InvalidAdapterPath(f"{source!r} does not exist; expected a folder with {ADAPTER_CONFIG_FILE}")
        if not self._allow_remote:
            raise InvalidAdapterPath(
                f"{source!r} is no folder here, and remote sources are off; "
                "set lora_config.allow_remote: true to fetch it from the Hugging Face Hub"
            )
        return self._fetch(source, repo["id"], repo["revision"])

    def _fetch(self, source: str, repo_id: str, revision: str | None) -> Path:
        logger.info("Fetching LoRA adapter %s from the Hugging Face Hub", source)
        try:
            # The small file first: a repo without it may be a whole base model.
            hf_hub_download(
                repo_id,
                ADAPTER_CONFIG_FILE,
                revision=revision,
                endpoint=self._endpoint,
                cache_dir=self._cache_dir,
            )
            folder = snapshot_download(
                repo_id,
                revision=revision,
                endpoint=self._endpoint,
                cache_dir=self._cache_dir,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
            )
        # The Hub's client raises its own errors, those of an HTTP library that changed between releases, and OSError.
        except Exception as error:
            raise InvalidAdapterPath(f"{source!r} cannot be fetched: {_reason(error, revision)}") from error
        return Path(folder).resolve()


def _reason(error: Exception, revision: str | None) -> str:
    """Why fetching failed, in one sentence."""
    if isinstance(error, LocalEntryNotFoundError):
        return "the Hub was not reached (is HF_HUB_OFFLINE set?) and the files are not all in the cache"
    if isinstance(error, GatedRepoError):
        return "access to the repo is restricted; set HF_TOKEN to a token that may read it"
    if isinstance(error, RepositoryNotFoundError):
        return "the Hub has no such repo, or it is private and HF_TOKEN is not set"
    if isinstance(error, RevisionNotFoundError):
        return f"the repo has no revision {revision!r}"
    if isinstance(error, EntryNotFoundError):
        return f"the repo has no {ADAPTER_CONFIG_FILE}, so it is not a PEFT adapter"
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"
