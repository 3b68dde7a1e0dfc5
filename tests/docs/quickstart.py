"""`make quickstart`: does what `docs/quickstart.md` says, block by block, from a fresh clone of what is committed.

Nothing but Python, git, make and a shell's own tools is on the `PATH`. Ends with one JSON line: how many blocks were
followed, and the seconds until the first adapter's answer. `--reuse` takes the packages and the demo model that are
here already, so that nothing is downloaded; without it they are fetched and made as on a new machine.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from cluster.demo.base_model import cache_dir
from deployments.local_cluster import port_is_free, stop_session
from tests.docs.fences import ROOT, Fence, fences
from tests.docs.run_blocks import Reader

PAGE = ROOT / "docs" / "quickstart.md"
URL = "http://127.0.0.1:8000"
TOOLS = (
    "python3", "git", "make", "sh", "bash", "env", "cat", "cp", "mv", "rm", "mkdir", "rmdir", "ls", "ln", "touch",
    "chmod", "head", "tail", "sort", "cut", "tr", "sed", "grep", "sleep", "date", "dirname", "basename", "uname", "id",
    "true", "false", "test", "expr", "printf", "echo", "tee", "wc", "find", "which", "ps", "kill",
)  # fmt: skip
"""What a machine has on which the page's three requirements are met."""

START_TIMEOUT_S = 3600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reuse", action="store_true", help="Take packages and model from this machine.")
    arguments = parser.parse_args()
    if not port_is_free("127.0.0.1", 8000):
        sys.exit("port 8000 is taken, which is where the page's server listens; stop what has it")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        environment = bare_environment(folder, reuse=arguments.reuse)
        first, (start, *rest) = split(list(fences(PAGE)))
        started = time.monotonic()
        reader = Reader(environment, folder=folder)
        for fence in first:
            check(reader, fence)
        clone = folder / "lora-fleet"
        if arguments.reuse:
            reuse_packages(clone)
        with served(start, clone, environment):
            shell = Reader(activated(environment, clone), folder=clone)
            for number, fence in enumerate(rest):
                check(shell, fence)
                if number == 0:
                    first_answer_s = time.monotonic() - started
    print(json.dumps({"blocks": len(first) + 1 + len(rest), "first_answer_s": round(first_answer_s, 1)}))
    return 0


def split(blocks: list[Fence]) -> tuple[list[Fence], list[Fence]]:
    """What comes before the server, and the server with what follows in the second terminal.

    The second terminal's first block, which goes to the clone and activates its environment, is `activated`.
    """
    server = next(index for index, fence in enumerate(blocks) if fence.words == ("serve",))
    entering = blocks[server + 1]
    assert entering.text == "cd lora-fleet\n. .venv/bin/activate\n", f"{entering.place}: how the second terminal begins"
    return blocks[:server], [blocks[server], *blocks[server + 2 :]]


def check(reader: Reader, fence: Fence) -> None:
    """Follow a block, or end."""
    print(f"{fence.place}: {fence.text.splitlines()[0]}", flush=True)
    fault = reader.follow(fence)
    if fault is not None:
        raise SystemExit(f"{fence.place}: {fault}")


def bare_environment(folder: Path, *, reuse: bool) -> dict[str, str]:
    """A shell's environment with nothing but `TOOLS` on its `PATH`."""
    tools = folder / "bin"
    tools.mkdir()
    for tool in TOOLS:
        path = os.path.realpath(sys.executable) if tool == "python3" else shutil.which(tool)
        if path is not None:
            (tools / tool).symlink_to(path)
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.upper() in KEPT}
    cache = str(cache_dir() if reuse else folder / "cache")
    return {
        **kept,
        "LORA_FLEET_CACHE": cache,
        "PATH": str(tools),
        "REPOSITORY": os.environ.get("REPOSITORY", str(ROOT)),
    }


KEPT = {"HOME", "LANG", "TMPDIR", "USER", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "SSL_CERT_FILE"}
"""Variables of this machine's network and user, which a new shell has as well."""


def activated(environment: dict[str, str], clone: Path) -> dict[str, str]:
    """What `. .venv/bin/activate` sets."""
    scripts = clone / ".venv" / "bin"
    return {**environment, "VIRTUAL_ENV": str(clone / ".venv"), "PATH": f"{scripts}{os.pathsep}{environment['PATH']}"}


def reuse_packages(clone: Path) -> None:
    """Make the clone's environment as `make setup` does, with this one's packages in it: pip finds them installed."""
    subprocess.run([os.path.realpath(sys.executable), "-m", "venv", str(clone / ".venv")], check=True)
    inner = clone / ".venv" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (inner / "of_this_machine.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    # Scripts that packages come with begin with the path of their Python, which shall be the clone's.
    here, there = Path(sys.executable).parent, clone / ".venv" / "bin"
    for script in here.iterdir():
        head = script.read_bytes()[:2]
        if head == b"#!" and not (there / script.name).exists() and script.name != "lora-fleet":
            lines = script.read_text().split("\n", 1)
            (there / script.name).write_text(f"#!{there / 'python'}\n{lines[1]}")
            (there / script.name).chmod(0o755)


@contextmanager
def served(start: Fence, clone: Path, environment: dict[str, str]) -> Iterator[None]:
    """The server of the first terminal: answering inside the block, stopped after it."""
    print(f"{start.place}: {start.text.splitlines()[0]}", flush=True)
    process = subprocess.Popen(["bash", "-euc", start.text], cwd=clone, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not healthy():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{start.place}: ended with status {process.poll()} before it served")
            time.sleep(1)
        yield
    finally:
        # Ctrl-C reaches all in the terminal's foreground; `lora-fleet up` takes its cluster down.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        stop_session(process)


def healthy() -> bool:
    """Whether it answers requests."""
    try:
        return httpx.get(f"{URL}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    sys.exit(main())
