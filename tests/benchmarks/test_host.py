"""Calls of ATen in a step of samestep beside those of a loop by hand: bounds that need no clock."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import host
import host_peers
from host import Row

LLAMA = Row(name="Llama", aim=None)


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
        (replace(LLAMA, model="gpt"), 0.22),
    ],
    ids=["float32", "bf16", "micro-batches", "micro-batches in bf16", "gpt", "gpt with dropout"],
)
def test_a_step_calls_hardly_more_than_a_loop_by_hand(row: Row, share: float) -> None:
    ours, peer = calls_of(row)
    assert ours <= (1 + share) * peer


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_what_a_step_calls_besides_does_not_grow_with_the_layers(precision: str) -> None:
    few, many = (calls_of(replace(LLAMA, precision=precision, options={"layers": layers})) for layers in (4, 12))
    # A call for each layer would be 8 more. A batch that the reading thread has not made yet is made in the step, by 4 calls.
    assert abs((many[0] - many[1]) - (few[0] - few[1])) <= 4
