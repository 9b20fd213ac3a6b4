"""Calls of ATen and of Python in a step of samestep beside those of a loop by hand: bounds that need no clock."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import host
import host_peers
from host import Row

from samestep.datasets import read_ahead

LLAMA = Row(name="Llama", aim=None)


@pytest.fixture(autouse=True)
def _no_thread_that_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every batch be made in the step: where reading takes long, as on a busy machine, a thread makes them, whose calls are not seen."""
    monkeypatch.setattr(read_ahead, "WORTH_A_THREAD_S", math.inf)


def calls_of(row: Row) -> tuple[int, int]:
    return host.calls_of(host.ours(row)), host.calls_of(host_peers.PEERS[row.peer](row))


@pytest.mark.parametrize(
    ("row", "share"),
    [
        (LLAMA, 0.03),
        (replace(LLAMA, precision="bf16"), 0.06),
        (replace(LLAMA, microbatches=4), 0.03),
        (replace(LLAMA, microbatches=4, precision="bf16"), 0.06),
        (replace(LLAMA, model="gpt", options={"dropout": 0.0}), 0.03),
        (replace(LLAMA, model="gpt"), 0.03),
        (replace(LLAMA, model="gpt", precision="bf16"), 0.12),
    ],
    ids=[
        "float32",
        "bf16",
        "micro-batches",
        "micro-batches in bf16",
        "gpt",
        "gpt with dropout",
        "gpt with dropout in bf16",
    ],
)
def test_a_step_calls_hardly_more_than_a_loop_by_hand(row: Row, share: float) -> None:
    ours, peer = calls_of(row)
    assert ours <= (1 + share) * peer


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_what_a_step_calls_besides_does_not_grow_with_the_layers(precision: str) -> None:
    few, many = (calls_of(replace(LLAMA, precision=precision, options={"layers": layers})) for layers in (4, 12))
    assert abs((many[0] - many[1]) - (few[0] - few[1])) <= 1


MOST_IN_A_STEP = 1_100
"""Python functions that a step calls besides those of a loop by hand, of a model without layers."""
MOST_IN_A_LAYER = 20
"""Python functions for each layer, which has nine weights."""


def python_calls_of(row: Row) -> int:
    """Return how many more Python functions a step calls than the loop by hand."""
    return host.python_calls_of(host.ours(row)) - host.python_calls_of(host_peers.PEERS[row.peer](row))


def test_a_step_calls_few_python_functions_that_a_loop_by_hand_does_not_and_hardly_any_in_a_layer() -> None:
    few, many = (python_calls_of(replace(LLAMA, options={"layers": layers})) for layers in (2, 10))
    assert few <= MOST_IN_A_STEP + 2 * MOST_IN_A_LAYER
    assert many - few <= 8 * MOST_IN_A_LAYER
