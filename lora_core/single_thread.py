"""Torch's operators on the calling thread alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_setting = threading.Lock()


@contextmanager
def single_threaded() -> Iterator[None]:
    """Within the block, the calling thread's operators start no threads that would take the step loop's cores.

    Other threads keep their number of threads, and threads that start later get the usual one.
    """
    # The number belongs to each thread, but setting it also makes it the one that later threads start with: a thread
    # made for the purpose sets that back, and leaves this one's alone. One at a time: until then, others would take the
    # one for theirs.
    with _setting:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        restore = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
        restore.start()
        restore.join()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
