"""This project's `kernels` package must not pass for Hugging Face's package of the same name."""

from transformers.utils.import_utils import is_kernels_available

import kernels


def test_transformers_does_not_take_this_package_for_its_own() -> None:
    assert is_kernels_available() is False
    assert kernels.__version__ == "0.1.0"
