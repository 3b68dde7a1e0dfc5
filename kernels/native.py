"""C sources of this package, compiled for the machine they run on, once, by its own C compiler.

The shared library is kept in the user's cache under a name made from everything it depends on: the source, the flags,
the compiler and the processor. It is linked with no OpenMP runtime: the one that torch has loaded serves both, so that
both use the same threads, and no core is fought for.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "LORA_FLEET_CACHE"
"""Environment variable that names the cache; unset: `~/.cache/lora-fleet`."""

COMPILERS = ("gcc", "cc", "clang")
"""In the order in which they are looked for."""

FLAGS = ("-O3", "-funroll-loops", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-std=gnu11")

COMPILATION_S = 60.0
"""Longest compilation: it takes about one second."""


@cache
def native_library(source: str) -> ctypes.CDLL | None:
    """The library of a C source of this package; None where it cannot be had, which is said once, with the reason.

    Args:
        source: File name in this folder.
    """
    try:
        return _load(Path(__file__).with_name(source))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        logger.warning("%s is not used, plain torch is: %s", source, error)
        return None


def checked_functions(
    source: str, names: Sequence[str], fault: Callable[[tuple[Any, ...]], str | None]
) -> tuple[Any, ...] | None:
    """Functions of a C source, each of which takes one packed struct; None where they are not to be used.

    What they return is whether they lacked memory: `MemoryError` then.

    A compiler that nobody has tried them with made them on this machine: if it did so wrongly, the log says so once.

    Args:
        source: File name in this folder.
        names: Of the functions.
        fault: Says what is wrong with what they compute; None where they are right.
    """
    library = native_library(source)
    if library is None:
        return None
    functions = tuple(getattr(library, name) for name in names)
    for function in functions:
        function.argtypes, function.restype = (ctypes.c_char_p,), _done
    reason = fault(functions)
    if reason is not None:
        logger.warning("%s, as compiled here, is not used, plain torch is: %s", source, reason)
        return None
    return functions


def _done(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for what a kernel computes in between")


def _load(source: Path) -> ctypes.CDLL:
    faults = []
    for compiler in filter(None, map(shutil.which, COMPILERS)):
        # Without OpenMP it runs on one thread, as where the compiler's runtime is not torch's.
        for openmp in (True, False):
            try:
                return _opened(source, compiler, openmp=openmp)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                faults.append(f"{compiler}: {error}")
    raise RuntimeError("; ".join(faults) or f"no C compiler was found (looked for {', '.join(COMPILERS)})")


def _opened(source: Path, compiler: str, *, openmp: bool) -> ctypes.CDLL:
    library = _compiled(source, compiler, openmp=openmp)
    try:
        return ctypes.CDLL(str(library))
    except OSError:
        # Damaged, or, the second time, not to be linked with what torch has loaded.
        library.unlink(missing_ok=True)
        return ctypes.CDLL(str(_compiled(source, compiler, openmp=openmp)))


def _compiled(source: Path, compiler: str, *, openmp: bool) -> Path:
    """The shared library, compiled now where it is not in the cache."""
    flags = (*FLAGS, "-fopenmp") if openmp else FLAGS
    headers = [header.read_bytes() for header in sorted(source.parent.glob("*.h"))]
    parts = [source.read_bytes(), *headers, *(part.encode() for part in (*flags, _version(compiler), _processor()))]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
    library = _folder() / f"{source.stem}-{digest}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".compiling-") as name:
            built = Path(name) / "object.o"
            _run(compiler, *flags, "-c", str(source), "-o", str(built))
            # Linked without -fopenmp: what it calls of OpenMP is found in what torch has loaded.
            _run(compiler, "-shared", str(built), "-o", str(built.with_suffix(".so")))
            # Whole or not at all, also where several processes compile at once.
            os.replace(built.with_suffix(".so"), library)
    return library


def _folder() -> Path:
    """A folder that nobody else can write to: what lies there is run."""
    root = Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/lora-fleet").expanduser()
    folder = root / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if (
            found.st_uid == os.getuid()
            and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            and os.access(folder, os.W_OK)
        ):
            return folder
    except OSError:
        pass
    return _temporary_folder()


@cache
def _temporary_folder() -> Path:
    # The library stays mapped after its file is gone, which it is with the process's other temporary files.
    return Path(tempfile.mkdtemp(prefix="lora-fleet-native-"))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILATION_S, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise RuntimeError(f"{Path(command[0]).name} failed: {lines[0] if lines else f'status {done.returncode}'}")
    return done.stdout


def _version(compiler: str) -> str:
    return _run(compiler, "--version").partition("\n")[0]


def _processor() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    named = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part", "CPU implementer")
    found = {line for line in lines if line.partition(":")[0].strip() in named}
    return platform.machine() + "\n".join(sorted(found))
