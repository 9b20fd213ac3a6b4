"""Under zero=1 the next forward begins while weights still arrive, and computes what it would with all of them there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from samestep.datasets import batches
from samestep.job import Job
from samestep.program import buckets
from samestep.program.ops import OpKind
from samestep.runtime.run import Run
from samestep.runtime.weights import flat_buffers, replicated
from samestep.runtime.weights.replicated import StandIn
from tests.laboratory import job_of, make_run, on_ranks
from tests.models import Tokens

SEVERAL = 2**12
"""Bytes of a bucket, of which the small models then have several."""
JOB = job_of(
    "float32", 4, optimizer={"name": "adamw", "lr": 1e-2, "clip_norm": 0.5, "options": {}}, train={"watch_every": 0}
)


class Late:
    """A gather whose result is not in the buffer before it is waited for."""

    def __init__(self, whole: Tensor, group: Any, events: list[str], name: str) -> None:
        self._whole, self._found = whole, whole.clone()
        send(OpKind.ALL_GATHER, self._found, group).wait()
        self._events, self._name = events, name

    def wait(self) -> None:
        self._whole.copy_(self._found)
        self._events.append(self._name)


send = flat_buffers.start_collective


def make(rank: int, world: int, model: str, layout: str, job: Job, owns_weights: bool, events: list[str]) -> Run:
    """Return a run with several buckets, which notes waits for their weights and the layers that begin."""
    made = make_run(rank, world, model, layout, job)
    made._stepper._owns_weights = owns_weights
    made.prepare(next(batches(Tokens(), job)).samples([0]))
    names = {flat.weights.data_ptr(): flat.bucket.name for flat in made.assembly.weights.store._flats}

    def late(kind: OpKind, flat: Tensor, group: Any) -> Any:
        return (
            Late(flat, group, events, names[flat.data_ptr()]) if kind is OpKind.ALL_GATHER else send(kind, flat, group)
        )

    replicated.start_collective = late
    for layer in made.program.step.model.layers:
        module = made.model.get_submodule(layer.modules[0])
        module.register_forward_hook(lambda *_, name=layer.name: events.append(name))
    return made


def taken(rank: int, world: int, model: str, layout: str, job: Job, looks_early: bool) -> list[Any]:
    """Return losses, weights and events of the last step of a run that waits, and of one that does not."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "bucket_bytes", lambda num_shards: SEVERAL)
        patch.setattr(replicated, "start_collective", send)
        for owns_weights in (False, True):
            events: list[str] = []
            run = make(rank, world, model, layout, job, owns_weights, events)
            last = [param for name, param in run.model.named_parameters() if param.dim() > 1][-1]
            (path,) = (name for name, param in run.model.named_parameters() if param is last)
            owner = run.model.get_submodule(path.rpartition(".")[0])
            if looks_early:  # the whole model reads its last weight before its first layer runs, from the third step on
                first = run.model.get_submodule(run.program.step.model.layers[0].modules[0])
                first.register_forward_hook(
                    lambda module, args, out, owner=owner, run=run: out + owner.weight.mean() * (run.steps_taken > 1)
                )
            losses = []
            for batch in batches(Tokens(), job):
                events.clear()
                losses.append(run.step(batch).loss)
            during = list(events)
            under_way = isinstance(owner._parameters["weight"], StandIn)
            weights = [param.detach().clone() for param in run.model.parameters()]
            found.append((losses, weights, during, under_way, isinstance(owner._parameters["weight"], StandIn)))
    return found


@pytest.mark.parametrize("looks_early", [False, True])
def test_weights_that_arrive_late_are_the_same_and_each_layer_waits_for_its_own(looks_early: bool) -> None:
    for waiting, late in on_ranks("dp=2 zero=1", taken, "llama", JOB, looks_early):
        assert late[0] == waiting[0]
        assert all(torch.equal(one, other) for one, other in zip(late[1], waiting[1], strict=True))
        assert (waiting[3], waiting[4]) == (False, False)
        assert (late[3], late[4]) == (True, False)  # until somebody asks the run for the model
        if looks_early:
            continue
        layers = [event for event in waiting[2] if not event.startswith("bucket.")]
        assert waiting[2][: len(layers)] == layers, "all gathers of a step that waits end it"
        before = late[2][: late[2].index(layers[-1])]
        assert before[0].startswith("bucket.")
        assert layers[0] in before[:-1]
        assert before.index(layers[0]) < max(i for i, event in enumerate(before) if event.startswith("bucket."))
        numbers = [int(event.removeprefix("bucket.")) for event in late[2] if event.startswith("bucket.")]
        assert numbers == sorted(numbers, reverse=True)
        assert len(numbers) == len([event for event in waiting[2] if event.startswith("bucket.")]) > 2
