"""States in 8 bits are packed on a device as on a CPU, in every layout: equal gradients give equal bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from samestep.job import Job
from samestep.layout import Layout
from samestep.proof import held_tensors, observation
from samestep.runtime.run import Run
from tests.device.simulated_cuda import refusal
from tests.laboratory import job_of, on_ranks, prepared_run

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal())

STEPS = 3
NEAR = 1e-6
"""Of the largest number of a tensor: a fused kernel rounds the last elements of a piece otherwise, and pieces end elsewhere. A
state that is packed into another code, or rounded to the other side, differs by a thousand times as much."""


def gradients_of(run: Run) -> list[dict[str, Tensor]]:
    """Return the gradients of each step, of other sizes in each."""
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        params = run.assembly.model.spec.params
        found.append({p.name: torch.randn(p.shape, generator=generator) * 10.0 ** (step - 2) for p in params})
    return found


def fed(rank: int, world: int, model: str, layout: str, job: Job) -> dict[str, Tensor]:
    """Feed equal gradients to the optimizer; return the weights and states of a rank, NaN where other ranks hold them."""
    run = prepared_run(rank, world, model, layout, job)
    run.assembly.weights.store.begin_step()
    for _ in observation.feed(run, gradients_of(run)):
        pass
    found: dict[str, Tensor] = {}
    for one in held_tensors.held_weights(run) + held_tensors.held_state(run):
        places = torch.as_tensor(one.places if isinstance(one.places, Tensor) else [*one.places])
        whole = found.setdefault(one.name, torch.full((2**14,), torch.nan))
        whole[places[places >= 0]] = one.values.float().cpu()[places >= 0]
    return found


@pytest.mark.parametrize("layout", ["dp=2 zero=3", "dp=1 offload"])
def test_states_are_packed_as_on_a_cpu(layout: str) -> None:
    job = job_of("float32", STEPS, numerics={"optimizer_states": "8bit"}, optimizer={"name": "adamw", "options": {}})
    (alone,) = on_ranks("dp=1", fed, "plain", job)
    ranks = on_ranks(layout, fed, "plain", job, device="cuda")
    assert len(ranks) == Layout(layout).world_size
    for name, expected in alone.items():
        held = torch.stack([seen[name] for seen in ranks if name in seen])
        found = held.nan_to_num(-torch.inf).amax(dim=0)
        is_there = ~expected.isnan()
        assert not found[is_there].isinf().any(), name
        near = NEAR * float(expected[is_there].abs().max())
        assert torch.allclose(found[is_there], expected[is_there], rtol=0, atol=near), name
