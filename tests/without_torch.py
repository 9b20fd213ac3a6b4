"""A plugin of pytest for an interpreter without torch: a file of tests, or a test, that imports torch is skipped there."""

from __future__ import annotations

import sys

import pytest
from hypothesis import settings

settings.register_profile("samestep", deadline=None)  # as in `conftest.py`, which imports torch
settings.load_profile("samestep")


class _NoTorch:
    """The last finder of modules, which is asked if there is no torch."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "torch":
            pytest.skip("there is no torch here", allow_module_level=True)


sys.meta_path.append(_NoTorch())  # type: ignore[arg-type]
