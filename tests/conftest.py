"""One thread a process, and the pools of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a fork with a used OpenMP pool hangs

import pytest
import torch

from tests import pool as pools

torch.set_num_threads(1)


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
