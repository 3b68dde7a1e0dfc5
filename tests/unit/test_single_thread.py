"""One thread computes alone, and no other is changed."""

import threading
from collections.abc import Iterator

import pytest
import torch

from lora_core.single_thread import single_threaded


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def in_another_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.usefixtures("three_threads")
def test_the_calling_thread_alone_is_changed() -> None:
    assert torch.get_num_threads() == in_another_thread() == 3
    with single_threaded():
        assert torch.get_num_threads() == 1
        assert in_another_thread() == 3
    assert torch.get_num_threads() == in_another_thread() == 3


@pytest.mark.usefixtures("three_threads")
def test_the_number_comes_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="stop"), single_threaded():
        raise ValueError("stop")
    assert torch.get_num_threads() == in_another_thread() == 3


@pytest.mark.usefixtures("three_threads")
def test_many_threads_at_a_time() -> None:
    seen: list[int] = []

    def work() -> None:
        for _ in range(20):
            with single_threaded():
                seen.append(torch.get_num_threads())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1] * 160
    assert torch.get_num_threads() == in_another_thread() == 3
