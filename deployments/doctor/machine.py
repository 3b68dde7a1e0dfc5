"""What Ray and the engines need of the operating system: shared memory, files, folders, and Ray itself."""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cluster.demo.base_model import cache_dir
from deployments.doctor.finding import Finding, fault, ok, warning
from deployments.local_cluster import OBJECT_STORE_BYTES, ray_command
from deployments.socket_folder import SocketFolder
from lora_core.memory_plan import gib

MIN_FILES = 4096
"""Each stream, each replica and each worker of Ray holds some open."""

MIN_DISK_BYTES = 2 << 30


def machine_findings() -> Iterator[Finding]:
    """All of them."""
    yield _ray()
    yield _shared_memory()
    yield _open_files()
    yield _sockets()
    yield _disk()


def _ray() -> Finding:
    missing = [name for name in ("ray", "serve") if not Path(ray_command(name)).exists()]
    if missing:
        return fault("ray commands", f"{ray_command(missing[0])} is missing", "install ray[serve] in this environment")
    address = os.environ.get("RAY_ADDRESS")
    if address:
        return ok(
            "ray commands", f"there; RAY_ADDRESS is {address}, which `serve run` joins and `lora-fleet up` does not"
        )
    return ok("ray commands", "there; `lora-fleet up` starts a cluster of its own")


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return warning(
            "shared memory", "there is no /dev/shm", "mount one: Ray's object store falls back to slow files"
        )
    if free < OBJECT_STORE_BYTES:
        return warning(
            "shared memory",
            f"{gib(free)} free in /dev/shm, and Ray's object store takes {gib(OBJECT_STORE_BYTES)}",
            "enlarge it (docker run --shm-size=1g); Ray falls back to slow files",
        )
    return ok("shared memory", f"{gib(free)} free in /dev/shm")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_FILES:
        raised = "as many" if hard == resource.RLIM_INFINITY or hard >= MIN_FILES else f"{hard}, or more as root"
        return warning(
            "open files", f"at most {soft} for each process", f"ulimit -n {MIN_FILES} (the hard limit allows {raised})"
        )
    return ok("open files", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft} for each process")


def _sockets() -> Finding:
    try:
        folder = SocketFolder()
    except OSError as error:
        return fault(
            "sockets", f"no folder for them can be made: {error}", "free space, or set TMPDIR to another folder"
        )
    path = folder.path.parent
    folder.remove()
    return ok("sockets", f"made in {path}")


def _disk() -> Finding:
    """Room for downloads, compiled kernels and Ray's logs."""
    cache = cache_dir()
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        return fault("cache", f"{existing} cannot be written to", "set LORA_FLEET_CACHE to another folder")
    places = {str(cache): existing, tempfile.gettempdir(): Path(tempfile.gettempdir())}
    for shown, folder in places.items():
        free = shutil.disk_usage(folder).free
        if free < MIN_DISK_BYTES:
            return warning("disk", f"{gib(free)} free for {shown}", f"leave {gib(MIN_DISK_BYTES)} at least")
    return ok(
        "disk", ", ".join(f"{gib(shutil.disk_usage(place).free)} free for {shown}" for shown, place in places.items())
    )
