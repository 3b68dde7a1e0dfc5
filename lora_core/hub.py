"""Adapters on a Hugging Face Hub: what a repo has, and fetching no more of it than an adapter's own files.

Files go to the Hub's own cache, through the Hub's own client: its locks, its retries and its settings hold. What is
added here: no request is without a time limit, `adapter_config.json` comes last, so that a cached folder that has one
is complete, and what a killed process left behind is removed.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from huggingface_hub import HfApi, constants, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils.tqdm import tqdm

from lora_core.errors import InvalidAdapter, InvalidAdapterPath
from lora_core.types import ADAPTER_CONFIG_FILE
from lora_core.weight_files import INDEX_FILE, find_weights, parse_index

logger = logging.getLogger(__name__)

MAX_JSON_BYTES = 16 * 2**20
"""Largest `adapter_config.json` or index that is fetched; a real one has thousands of bytes."""

PROGRESS_S = 10.0
"""Time between two lines of the log about a download that goes on."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_TRANSIENT = (408, 429, 500, 502, 503, 504)

# What the client names the files it is writing. No later download goes on with one: the middle part is random.
_PARTIAL = re.compile(r"(?P<etag>[^.]+)\.[0-9a-f]{8}\.incomplete")


class HubRepos:
    """Fetches adapters from a Hub. Thread-safe; repos fetched by several threads or processes at once come once.

    Time: a Hub that is silent is given up after `HF_HUB_ETAG_TIMEOUT` (10 s) for each question, and within a file
    after six silences of `HF_HUB_DOWNLOAD_TIMEOUT` (10 s), each try a second after the last.
    """

    def __init__(self, *, endpoint: str | None, cache_dir: Path | None, max_bytes: int | None) -> None:
        """Set which Hub, and where its files are kept; see `AdapterStore`."""
        self._api = HfApi(endpoint=endpoint)
        self._cache_dir = Path(constants.HF_HUB_CACHE) if cache_dir is None else cache_dir
        self._max_bytes = max_bytes

    def fetch(self, repo_id: str, revision: str | None) -> Path:
        """The folder of a repo's adapter in the cache, as the Hub has it now.

        A commit that is all in the cache is not asked for. A cached adapter also serves while the Hub cannot be
        reached, and is all that serves with `HF_HUB_OFFLINE`.

        Raises:
            InvalidAdapterPath: why not, in one sentence that does not name the repo.
        """
        revision = revision or constants.DEFAULT_REVISION
        cached: Path | None = None
        try:
            _remove_leftovers(self._cache_dir, repo_id)
            cached, lacking = self._cached(repo_id, revision)
            if constants.HF_HUB_OFFLINE and cached is None:
                raise InvalidAdapterPath(
                    f"the Hub was not reached, because HF_HUB_OFFLINE is set, and the cache {str(self._cache_dir)!r} "
                    f"lacks {lacking}; unset HF_HUB_OFFLINE to fetch it"
                )
            if cached is not None and (constants.HF_HUB_OFFLINE or _COMMIT.fullmatch(revision)):
                return cached
            return self._fetch(repo_id, revision)
        except InvalidAdapterPath:
            raise
        # The Hub's client raises its own errors, those of an HTTP library that changed between releases, and OSError.
        except Exception as error:
            if cached is not None and not _is_final(error):
                logger.warning("Using the cached %s: %s", repo_id, self._reason(error, revision))
                return cached
            raise InvalidAdapterPath(self._reason(error, revision)) from error

    def _cached(self, repo_id: str, revision: str) -> tuple[Path | None, str]:
        """The complete folder of a revision in the cache; or None, and what it lacks."""
        config = try_to_load_from_cache(repo_id, ADAPTER_CONFIG_FILE, cache_dir=self._cache_dir, revision=revision)
        if not isinstance(config, str):
            return None, f"its {ADAPTER_CONFIG_FILE}"
        folder = Path(config).parent
        lacking = _lacking(folder)
        return (folder, "") if lacking is None else (None, lacking)

    def _fetch(self, repo_id: str, revision: str) -> Path:
        info = self._api.model_info(
            repo_id, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT, files_metadata=True
        )
        assert info.sha is not None, "the Hub named no commit"
        sizes = {file.rfilename: file.size for file in info.siblings or ()}
        repo = _Commit(self._api, self._cache_dir, repo_id, info.sha)
        names = _wanted(sizes, repo)
        _check_size(sum(sizes.get(name) or 0 for name in names), self._max_bytes)
        began = time.monotonic()
        if not all(repo.has(name) for name in names):
            logger.info("Fetching LoRA adapter %s at commit %s from %s", repo_id, info.sha, self._api.endpoint)
            for name in names:
                repo.download(name, self._max_bytes)
            logger.info("Fetched LoRA adapter %s in %.1f s", repo_id, time.monotonic() - began)
        if not _COMMIT.fullmatch(revision) and self._cached(repo_id, revision)[0] != repo.folder:
            repo.remember_as(revision)
        return repo.folder

    def _reason(self, error: BaseException, revision: str) -> str:
        """Why fetching failed, in one sentence."""
        if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
            return self._reason(error.__cause__, revision)
        if isinstance(error, GatedRepoError):
            return "access to the repo is restricted; set HF_TOKEN to a token that may read it"
        if isinstance(error, RepositoryNotFoundError):
            return "the Hub has no such repo, or it is private and HF_TOKEN is not set to a token that may read it"
        if isinstance(error, RevisionNotFoundError):
            return f"the repo has no revision {revision!r}"
        # Without the queries of its URLs: those of a CDN let their bearer read the file.
        first_line = re.sub(r"(https?://[^\s?']+)\?[^\s']*", r"\1", str(error).partition("\n")[0])
        if isinstance(error, EntryNotFoundError):
            return f"the Hub lists a file that it does not have: {first_line}"
        if isinstance(error, HfHubHTTPError):
            return f"the Hub answered with an error: {first_line}"
        if isinstance(error, OSError) and error.errno is not None:
            hint = "free some, or set HF_HOME to a larger disk" if error.errno == errno.ENOSPC else "HF_HOME moves it"
            return f"the cache {str(self._cache_dir)!r} cannot be written: {os.strerror(error.errno)}; {hint}"
        what = f"{type(error).__name__}: {first_line}"
        if isinstance(error, OSError | ValueError):
            return what
        return f"the Hub was not reached, or broke off ({what}); HF_ENDPOINT says where it is"


class _Commit:
    """One commit of a repo, and its folder in the cache."""

    def __init__(self, api: HfApi, cache_dir: Path, repo_id: str, sha: str) -> None:
        self._api, self._cache_dir, self._repo_id, self._sha = api, cache_dir, repo_id, sha
        self.folder = cache_dir / repo_folder_name(repo_id=repo_id, repo_type="model") / "snapshots" / sha

    def has(self, name: str) -> bool:
        """Whether the cache has this file."""
        return (self.folder / name).is_file()

    def download(self, name: str, max_bytes: int | None) -> None:
        """Fetch one file into the cache, whole or not at all."""
        if self.has(name):
            return
        _, size = self._ask(name, self._sha)
        _check_size(size or 0, MAX_JSON_BYTES if name.endswith(".json") else max_bytes, name)
        self._api.hf_hub_download(
            self._repo_id,
            name,
            revision=self._sha,
            cache_dir=self._cache_dir,
            etag_timeout=constants.HF_HUB_ETAG_TIMEOUT,
            tqdm_class=LoggedProgress,
        )

    def remember_as(self, revision: str) -> None:
        """Have the cache know this commit by a branch or tag, unless that has moved on or cannot be asked for."""
        with contextlib.suppress(Exception):
            commit, _ = self._ask(ADAPTER_CONFIG_FILE, revision)
            if commit == self._sha:
                # The file is there: this only notes the revision.
                self._api.hf_hub_download(
                    self._repo_id,
                    ADAPTER_CONFIG_FILE,
                    revision=revision,
                    cache_dir=self._cache_dir,
                    etag_timeout=constants.HF_HUB_ETAG_TIMEOUT,
                )

    def _ask(self, name: str, revision: str) -> tuple[str | None, int | None]:
        """Commit and size of a file; None is unknown.

        Asked before each download because a download's own question, when it meets silence, is repeated for minutes.
        """
        url = hf_hub_url(self._repo_id, name, revision=revision, endpoint=self._api.endpoint)
        try:
            metadata = self._api.get_hf_file_metadata(url=url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except HfHubHTTPError as error:
            if error.response.status_code not in _TRANSIENT:
                raise
            # The download waits and asks again, as the Hub's client does.
            return None, None
        return metadata.commit_hash, metadata.size


class LoggedProgress(tqdm):
    """The Hub's progress bar; without a terminal to show it, a line in the log every ten seconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._name = kwargs.get("desc") or "download"
        self._num_done = kwargs.get("initial") or 0
        self._logged_at = time.monotonic()
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

    def update(self, n: float | None = 1) -> bool | None:
        """Add to what is done."""
        if self.disable:
            self._num_done += n or 0
            if time.monotonic() - self._logged_at >= PROGRESS_S:
                self._logged_at = time.monotonic()
                total = "?" if self.total is None else f"{self.total / 1e6:.1f}"
                logger.info("Fetching %s: %.1f of %s MB", self._name, self._num_done / 1e6, total)
        shown: bool | None = super().update(n)
        return shown


def _wanted(sizes: Collection[str], repo: _Commit) -> list[str]:
    """The files of an adapter among those of a repo, in the order they are to come: the config last.

    Raises:
        InvalidAdapterPath: the repo holds no adapter, or none that is served.
    """
    if ADAPTER_CONFIG_FILE not in sizes:
        raise InvalidAdapterPath(f"the repo has no {ADAPTER_CONFIG_FILE}, so it is not a PEFT adapter")
    try:
        first = find_weights(sizes)
        if first != INDEX_FILE:
            return [first, ADAPTER_CONFIG_FILE]
        repo.download(INDEX_FILE, None)
        shards = _shards(repo.folder)
    except InvalidAdapter as error:
        raise InvalidAdapterPath(f"the repo has no weights to serve: {error}") from error
    if absent := sorted(shards - set(sizes)):
        raise InvalidAdapterPath(f"its {INDEX_FILE} names {', '.join(absent)}, which the repo does not have")
    return [*sorted(shards), INDEX_FILE, ADAPTER_CONFIG_FILE]


def _shards(folder: Path) -> set[str]:
    return set(parse_index((folder / INDEX_FILE).read_bytes()).values())


def _lacking(folder: Path) -> str | None:
    """What a cached folder that has a config lacks of an adapter; None if it is complete."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    try:
        first = find_weights(names)
    except InvalidAdapter:
        return f"its {INDEX_FILE}" if any(name.endswith(".safetensors") for name in names) else "its weights"
    try:
        absent = sorted(_shards(folder) - names) if first == INDEX_FILE else []
    except InvalidAdapter:
        return None  # complete, and refused for what it is when it is read
    return f"its {', '.join(absent)}" if absent else None


def _check_size(num_bytes: int, max_bytes: int | None, name: str = "weights") -> None:
    if max_bytes is not None and num_bytes > max_bytes:
        setting = "" if name.endswith(".json") else "; a larger lora_config.max_download_bytes allows more"
        raise InvalidAdapterPath(f"its {name} take {num_bytes} bytes, at most {max_bytes} are fetched{setting}")


def _is_final(error: Exception) -> bool:
    """Whether the Hub said no, rather than nothing."""
    return isinstance(error, HfHubHTTPError) and error.response.status_code not in _TRANSIENT


def _remove_leftovers(cache_dir: Path, repo_id: str) -> None:
    """Remove what downloads of this repo have left that ended without tidying up: those of killed processes."""
    folder = repo_folder_name(repo_id=repo_id, repo_type="model")
    with contextlib.suppress(OSError):
        for path in (cache_dir / folder / "blobs").iterdir():
            match = _PARTIAL.fullmatch(path.name)
            if match is None:
                continue
            with _client_lock(cache_dir / ".locks" / folder / f"{match['etag']}.lock") as is_held:
                if is_held and not _is_open(path):
                    path.unlink(missing_ok=True)
                    logger.info("Removed %s, left by a download that was killed", path)


@contextlib.contextmanager
def _client_lock(path: Path) -> Iterator[bool]:
    """Hold the lock under which the Hub's client downloads a file, if nobody else does."""
    lock = FileLock(path, timeout=0, mode=0o664)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (Timeout, OSError, NotImplementedError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _is_open(path: Path) -> bool:
    """Whether any process has this file open, or it cannot be told: some file systems grant one lock to all."""
    try:
        with path.open("rb") as file:
            # A write lease is given only on a file that nobody else has open.
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
