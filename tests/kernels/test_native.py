"""The compiled kernel: how it is made and kept, what becomes of a machine without it, and its corners."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import build_routing, native, sgmv, sgmv_native
from kernels.loops import Loop, Segment
from kernels.native import CACHE_VARIABLE, checked_functions, native_library
from kernels.sgmv_native import expand_native, sgmv_function
from tests.kernels.cases import make_case

CPU = torch.device("cpu")
SOURCE = "sgmv_native.c"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a process that has compiled nothing."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    for remembered in (native_library, sgmv_function, native._temporary_folder):
        remembered.cache_clear()
    yield tmp_path / "native"
    for remembered in (native_library, sgmv_function, native._temporary_folder):
        remembered.cache_clear()


def product() -> Tensor:
    """What a step of two adapters gives."""
    case = make_case(
        [(1, 2), (0, 1)], ranks=[8, 5], max_rank=8, in_features=32, slices=(16,), dtype=torch.float32, device=CPU
    )
    return case.result()


def test_it_is_compiled_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = product()
    (library,) = cache.iterdir()
    assert library.suffix == ".so"
    assert cache.stat().st_mode & 0o777 == 0o700
    written = library.stat().st_mtime_ns
    native_library.cache_clear()
    sgmv_function.cache_clear()
    assert torch.equal(product(), expected)
    assert [path.stat().st_mtime_ns for path in cache.iterdir()] == [written]


def test_it_uses_the_openmp_runtime_of_torch(cache: Path) -> None:
    """One of its own would fight with torch's for the cores."""
    assert native_library(SOURCE) is not None
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(loaded) == 1


def test_without_a_compiler_torch_multiplies(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = product()
    native_library.cache_clear()
    sgmv_function.cache_clear()
    shutil.rmtree(cache)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(product(), expected)
        assert torch.equal(product(), expected)
    (record,) = caplog.records
    assert "no C compiler was found (looked for gcc, cc, clang)" in record.message


def test_a_compiler_that_fails_is_quoted(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "gcc"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "error: out of order" >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(broken) if name == "gcc" else None)
    with caplog.at_level(logging.WARNING):
        assert not product().isnan().any()
    (record,) = caplog.records
    assert "gcc failed: error: out of order" in record.message
    assert list(cache.iterdir()) == []


RIGHT = {
    "torch.float32": "*(f8 *)((float *)y + index) += delta;",
    "torch.bfloat16": "round8((uint16_t *)y + index, values8(y, BF16, index) + delta);",
}


@pytest.mark.parametrize("dtype", RIGHT)
def test_a_kernel_that_computes_wrongly_is_not_used(
    dtype: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = Path(sgmv_native.__file__).with_name(SOURCE).read_text()
    shutil.copy(Path(sgmv_native.__file__).with_name("native_vectors.h"), cache.parent)
    wrong = cache.parent / SOURCE
    wrong.write_text(source.replace(RIGHT[dtype], RIGHT[dtype].replace("delta", "delta / 2")))
    assert wrong.read_text() != source
    monkeypatch.setattr(native, "__file__", str(cache.parent / "native.py"))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(product(), product())
    (record,) = caplog.records
    assert "sgmv_native.c, as compiled here, is not used" in record.message
    assert f"a product of its in {dtype} differs" in record.message


def test_a_function_that_lacks_memory_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache.parent / "poor.c").write_text("int poor(const char *call) { return *call == 'x'; }")
    monkeypatch.setattr(native, "__file__", str(cache.parent / "native.py"))
    functions = checked_functions("poor.c", ["poor"], lambda functions: None)
    assert functions is not None
    functions[0](b"enough")
    with pytest.raises(MemoryError, match="no memory for what a kernel computes in between"):
        functions[0](b"x")


def test_a_cache_that_others_can_write_to_is_not_used(cache: Path) -> None:
    """What lies there is run."""
    cache.mkdir()
    cache.chmod(0o777)
    assert native_library(SOURCE) is not None
    assert list(cache.iterdir()) == []


def test_a_damaged_library_is_no_fault(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = product()
    (library,) = cache.iterdir()
    # Unlinked first: a library that is in use is not written to.
    library.unlink()
    library.write_bytes(b"no library")
    native_library.cache_clear()
    sgmv_function.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert torch.equal(product(), expected)
    assert not caplog.records
    assert [path.name for path in cache.iterdir()] == [library.name]


@pytest.mark.parametrize("num_threads", [2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_change_no_bit(dtype: torch.dtype, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, x, y = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((3, 2 * 16, 576), (3, 1000, 16), (20, 576), (20, 1000))
    )
    routing = build_routing([2, 1, 0], [0, 1, 3, 20], [16, 9, 12], num_rows=20, max_groups=3, device=CPU)
    results = []
    before = torch.get_num_threads()
    for count in (1, num_threads):
        torch.set_num_threads(count)
        try:
            results.append(y.clone())
            sgmv(x, a, b, results[-1], routing, (600, 400))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*results)


@given(
    rank=st.integers(1, 40),
    spare=st.integers(0, 9),
    rows=st.integers(1, 9),
    width=st.integers(1, 70),
    slices=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(deadline=None, max_examples=200)
def test_nothing_past_the_rank_counts(
    rank: int, spare: int, rows: int, width: int, slices: list[int], dtype: torch.dtype
) -> None:
    """Any rank, also one that is no multiple of a vector, with NaN beside it in A, in B and in what is reused."""
    generator = torch.Generator().manual_seed(rank)
    max_rank, out = rank + spare, sum(slices)
    x = torch.randint(-2, 3, (rows, width), generator=generator).to(dtype)
    y = torch.randint(-2, 3, (rows, out), generator=generator).to(dtype)
    a = torch.full((1, len(slices), max_rank, width), torch.nan, dtype=dtype)
    b = torch.full((1, out, max_rank), torch.nan, dtype=dtype)
    a[:, :, :rank] = torch.randint(-1, 2, (1, len(slices), rank, width), generator=generator)
    b[:, :, :rank] = torch.randint(-1, 2, (1, out, rank), generator=generator)
    expected = y.double()
    for p, target in enumerate(expected.split_with_sizes(slices, 1)):
        low = x.double() @ a[0, p, :rank].double().t()
        target += low @ b[0].split_with_sizes(slices)[p][:, :rank].double().t()
    loop = Loop((Segment(0, 0, rows, rank),))
    sgmv_native.sgmv_native(x, a.view(1, -1, width), b, y, loop, tuple(slices))
    assert torch.equal(y, expected.to(dtype))


def test_bf16_is_rounded_as_torch_rounds() -> None:
    """Every bf16 number plus a delta: ties to even, infinities, and what is no number."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    y = bits.view(torch.bfloat16).view(-1, 256)
    delta = torch.linspace(-1e3, 1e3, y.shape[0]).view(-1, 1)
    expected = (y.float() + delta).bfloat16()
    found = y.clone()
    segment = Segment(0, 0, y.shape[0], 1)
    expand_native(delta.contiguous(), torch.ones(1, 256, 1, dtype=y.dtype), found, Loop((segment,)))
    is_number = ~expected.isnan()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[is_number], expected[is_number])
