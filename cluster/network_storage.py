"""Whether a file lies on storage that other machines share."""

import os
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
"""Where Linux lists what is mounted; other systems have no such file."""

NETWORK_FILE_SYSTEMS = frozenset(
    (
        *("nfs", "nfs3", "nfs4", "cifs", "smb3", "smbfs", "ceph", "glusterfs", "lustre"),
        *("gpfs", "beegfs", "orangefs", "afs", "ocfs2", "gfs2", "9p", "virtiofs"),
    )
)
"""File systems that several machines may write at once. Those in user space (`fuse.*`) count as such, too."""


def is_shared(path: Path, mounts: Path = MOUNTS) -> bool:
    """Whether `path`, which may not exist yet, lies on a file system that several machines may have open.

    False where the system does not tell.
    """
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    place = os.path.realpath(path)
    # Of mounts that contain the path the innermost counts, and of several on one point the last.
    found = max(
        ((len(point), number, kind) for number, (point, kind) in enumerate(map(_mount, lines)) if _holds(point, place)),
        default=(0, 0, ""),
    )
    kind = found[2]
    return kind in NETWORK_FILE_SYSTEMS or kind.startswith("fuse.") or kind == "fuse"


def _mount(line: str) -> tuple[str, str]:
    """Mount point and file system of a line of mountinfo(5)."""
    fields, _, rest = line.partition(" - ")
    point = fields.split(" ")[4]
    for escape, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(escape, character)
    return point, rest.split(" ")[0]


def _holds(point: str, place: str) -> bool:
    return place == point or place.startswith(point.rstrip("/") + "/")
