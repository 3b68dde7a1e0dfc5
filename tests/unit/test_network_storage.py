"""Telling storage that other machines share from this machine's own."""

from pathlib import Path

import pytest

from cluster.network_storage import MOUNTS, is_shared

TABLE = """\
21 1 252:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 21 0:25 / /home rw shared:5 - nfs4 server:/home rw,vers=4.2
31 30 252:2 / /home/local rw - xfs /dev/vdb rw
32 21 0:26 / /mnt/my\\040share rw - cifs //server/share rw
33 21 0:27 / /data rw - fuse.s3fs s3fs rw
34 21 0:28 / /over rw - ext4 /dev/vdc rw
35 34 0:29 / /over rw - ceph monitor:/ rw
"""


@pytest.mark.parametrize(
    ("path", "shared"),
    [
        ("/var/journal.sqlite", False),
        ("/home/journal.sqlite", True),
        ("/home/deeper/not/there/yet/journal.sqlite", True),
        ("/home/local/journal.sqlite", False),
        ("/homely/journal.sqlite", False),
        ("/mnt/my share/journal.sqlite", True),
        ("/data/journal.sqlite", True),
        ("/over/journal.sqlite", True),
    ],
)
def test_the_innermost_mount_decides(path: str, shared: bool, tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    assert is_shared(Path(path), table) == shared


def test_links_are_followed_and_a_system_that_does_not_tell_has_none(tmp_path: Path) -> None:
    share, table = tmp_path / "share", tmp_path / "mountinfo"
    share.mkdir()
    table.write_text(f"1 0 0:1 / / rw - ext4 /dev/vda rw\n2 1 0:2 / {share} rw - nfs server:/ rw\n")
    (tmp_path / "link").symlink_to(share)
    assert is_shared(tmp_path / "link" / "journal.sqlite", table)
    assert not is_shared(tmp_path / "journal.sqlite", table)
    assert not is_shared(share, tmp_path / "no such table")


def test_the_mounts_of_this_machine_can_be_read(tmp_path: Path) -> None:
    if MOUNTS.exists():
        assert is_shared(tmp_path) in (False, True)
        assert not is_shared(Path("/proc/journal.sqlite"))
