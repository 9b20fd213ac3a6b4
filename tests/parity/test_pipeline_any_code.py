"""Stages of a pipeline evaluate, give outputs and keep dtypes as one device does; the models are those of `code/stages.py`."""

from __future__ import annotations

import pytest
import torch

from samestep.datasets import batches
from tests.code.stages import IN_FLOAT32
from tests.laboratory import Observed, code_of, job_for, job_of, make_run, observe
from tests.pool import pool


def evaluated(rank: int, world: int, name: str, layout: str) -> tuple[float, torch.Tensor]:
    """Return a held-out loss and the outputs for three samples, which are fewer than a step has."""
    job = job_for(name)
    run, batch = make_run(rank, world, name, layout, job), next(batches(code_of(name).data(), job))
    run.step(batch)
    outputs = run.outputs(batch.samples(list(range(3))))
    return run.evaluate(batch)["loss"], outputs["logits"] if isinstance(outputs, dict) else outputs


@pytest.mark.parametrize("name", [f"stages {name}" for name in ("skips", "conditioned", "dropped", "in_place")])
def test_stages_evaluate_and_give_outputs_as_one_device_does(name: str) -> None:
    loss, outputs = evaluated(0, 1, name, "dp=1")
    for found, given in pool(2).run(evaluated, name, "pp=2 microbatch=4"):
        assert found == pytest.approx(loss, rel=1e-12)
        assert torch.allclose(given, outputs, rtol=1e-9, atol=1e-12)


def watch(rank: int, world: int, name: str, layouts: list[str], precision: str) -> list[Observed]:
    job = job_of(precision, 2, optimizer={"clip_norm": 0.5})
    return [observe(rank, world, name, layout, job, True) for layout in layouts]


@pytest.mark.parametrize("name", [f"stages {name}" for name in IN_FLOAT32])
def test_a_dtype_of_ones_own_is_kept_in_float32_and_bf16(name: str) -> None:
    """Layouts with the same micro-batches round alike, up to the order of float32 sums."""
    for precision in ("float32", "bf16") if name != "stages automatic" else ("float32",):
        (reference,) = watch(0, 1, name, ["dp=1 microbatch=4"], precision)
        layouts = ["pp=2 microbatch=4", "pp=2 microbatch=4 schedule=zero-bubble"]
        for ranks in zip(*pool(2).run(watch, name, layouts, precision), strict=True):
            for one in ranks:
                assert one.losses == pytest.approx(reference.losses, rel=3e-6)
                assert one.ledger == one.predicted
