"""Blocks that run as graphs: the result, the masks and what is sent are those of a run without.

Most run on torch's backend `aot_eager`, which makes the graphs, forward and backward, and needs no compiler; there a block
without islands computes the same bits. `inductor`, which fuses kernels, is for `make parity`.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.evaluation import outputs_of
from samestep.runtime.run import Run
from tests.laboratory import (
    TOLERANCE,
    Observed,
    assert_ledger,
    assert_same,
    clipped,
    follow,
    make_run,
    on_ranks,
    reference,
)
from tests.models import Tokens

GRAPHS = {"compile": "blocks", "compile_backend": "aot_eager"}
KERNELS = {"compile": "blocks", "compile_backend": "inductor"}


def job_of(run: dict[str, Any], precision: str = "float64", **train: Any) -> Job:
    return Job(**{**clipped(precision, **train).model_dump(), "run": run})


def observed(rank: int, world: int, model: str, layout: str, job: Job) -> tuple[Observed, list[str], int]:
    run = make_run(rank, world, model, layout, job)
    seen = follow(run, Tokens(), job, record=True)
    return seen, run._refusals.remarks, run.assembly.model.compiled.num_graphs


def prove_compiled(layout: str, model: str, run: dict[str, Any]) -> list[str]:
    """Hold a layout with compiled blocks against one device without, and return what the first rank remarks."""
    seen = on_ranks(layout, observed, model, job_of(run))
    assert_same([one for one, _, _ in seen], reference(model), TOLERANCE)
    assert_ledger([one for one, _, _ in seen], layout)
    assert all(graphs for _, _, graphs in seen)
    assert not any("anew" in line or "uncompiled" in line for _, lines, _ in seen for line in lines), seen[0][1]
    return seen[0][1]


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("dp=2 zero=3 microbatch=2", "plain_with_dropout"),
        ("tp=2 sequence_parallel recompute=full", "llama"),
        ("dp=1 pp=2 microbatch=2", "plain"),
        *(
            pytest.param(layout, model, marks=pytest.mark.nightly)
            for layout, model in [
                ("dp=2", "llama"),
                ("dp=2 zero=1 offload", "plain"),
                ("dp=2 zero=2 microbatch=2", "gpt2_with_dropout"),
                ("dp=2 zero=3 recompute=full", "gpt2_with_dropout"),
                ("tp=2", "gpt2_with_dropout"),
                ("tp=2 dp=1 pp=2 microbatch=2", "llama"),
                ("dp=2 ep=2", "mixtral_balanced"),
            ]
        ),
    ],
)
def test_a_layout_of_graphs_is_one_device_without(layout, model):
    prove_compiled(layout, model, GRAPHS)
