"""One thread a process, and the pools of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a fork with a used OpenMP pool hangs

import pytest
import torch
from hypothesis import settings

from tests import pool as pools

torch.set_num_threads(1)
settings.register_profile("samestep", deadline=None)  # no test asserts on the clock
settings.load_profile("samestep")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-layout", action="store_true", help="run the nightly combinations too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the nightly combinations out, and the tests for an accelerator where there is none."""
    left = [item for item in items if _runs(config, item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(left)])
    items[:] = left


def _runs(config: pytest.Config, item: pytest.Item) -> bool:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return False
    return config.getoption("--every-layout") or not item.get_closest_marker("nightly")


@pytest.fixture(scope="session", autouse=True)
def _no_pool_is_left() -> Iterator[None]:
    yield
    pools.close_all()


@pytest.fixture(scope="session")
def pool2() -> pools.Pool:
    return pools.pool(2)


@pytest.fixture(scope="session")
def pool4() -> pools.Pool:
    return pools.pool(4)
