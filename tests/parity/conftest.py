"""Runs that several files of tests read, and none changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import traced


@pytest.fixture(scope="session", autouse=True)
def _alike_code_is_traced_once() -> Iterator[None]:
    with traced.alike_once():
        yield


@pytest.fixture(scope="session")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    from tests.parity.test_init_from import OLD
    from tests.parity.test_lora import steps

    out = tmp_path_factory.mktemp("old")
    steps(0, 1, "dp=1", OLD, out, 2)
    return out
