"""State that a sample of one step hands to the sample at its place in the next: lanes, as of a text that is cut into columns.

```python
for batch in samestep.batches(source, job, lanes=True):     # the model: forward(batch, carried) -> outputs, carried
    run.step(batch)
```
Place i of a step is lane i, and x[i, k] its samples, step by step. With the state c[i, 0] = None the step k computes, for its lanes at once,

    outputs[:, k], c[:, k + 1] = forward(x[:, k], detached c[:, k])

so the state enters as an argument of the forward and leaves with its outputs. It is a sample's own like the sample itself: it goes through
micro-batches and data ranks with it, and whatever reads the sample again in the step (the canary) reads the state before the step.
Which dimension of each tensor holds the lanes is seen by two forwards, of two samples and of three, on the meta device. Where a batch has a
tensor `starts` of booleans, the state of the lanes that it marks is set to zero before the step.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from samestep.building.initial_values import Blueprint
from samestep.building.model import BatchDim
from samestep.building.module_copies import deep_copy
from samestep.building.named_tensors import cast_floating
from samestep.building.several_models import as_one
from samestep.datasets.values import first_of, num_samples, rows_of
from samestep.errors import DataError, LayoutError, ModelError
from samestep.examination.examine import Source, build_blueprint
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.step_observer import Indices
from samestep.trees import map_tensors, tree_flatten, tree_leaves, tree_unflatten


class LaneOutputs(NamedTuple):
    """The result of a forward over lanes: the outputs, and the state with the lanes along its first dimension."""

    outputs: Any
    carried: Any


class CarriedLanes:
    """The state of the lanes of one run on this rank; empty in a run whose batches have none."""

    def __init__(self) -> None:
        self._now: dict[int, list[Tensor]] = {}
        """The state before the step, by lane: its tensors without the dimension of lanes."""
        self._next: dict[int, list[Tensor]] = {}
        self._step = -1
        """The step whose forwards leave the next state."""
        self._form: Any = None
        """How the tensors are nested."""
        self._dims: list[int] | None = None
        """The dimension of the lanes in each tensor of the state."""
        self._count = 0
        """The number of lanes."""
        self._turn: BatchDim | None = None

    @property
    def are_ready(self) -> bool:
        """Whether the run's forward is given the state of lanes."""
        return self._dims is not None

    # -- a run -------------------------------------------------------------------------------------

    def of(self, batch: Any) -> Any:
        """Return a batch with the state of its lanes, if it is one of lanes.

        Raises:
            DataError: it has another number of lanes than the steps before.
        """
        stream = getattr(batch, "stream", None)
        if stream is None or not stream.has_lanes or isinstance(batch, LaneBatch):
            return batch
        if batch.step != self._step:  # each forward of one step begins with the state before it
            self._commit()
            self._step = batch.step
        if self._count not in (0, batch.num_samples):
            raise DataError(
                "lanes",
                f"step {batch.step + 1} has {batch.num_samples} samples, and the steps before had {self._count} lanes. Use the same number in "
                "each step, or drop_last=True",
            )
        self._count = batch.num_samples
        if stream.begins_lanes(batch.step):
            self._now = {}
        return LaneBatch(batch, self)

    def loss_of(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return a loss that is given the outputs without the state of the lanes."""
        return _loss_of(loss) if self.are_ready else loss

    def source_of(self, source: Source, job: Job, layout: Layout, example: Any, turn: BatchDim | None = None) -> Source:
        """Return the source of a run whose forward is given the state of lanes, and whose loss is not.

        Raises:
            LayoutError: the layout cuts the forward in a way in which the state has no one place.
            ModelError: the forward does not return outputs and a state with one row for each sample.
        """
        if layout.pp > 1 or layout.cp > 1:
            raise LayoutError(
                "lanes",
                f"{str(layout)!r} splits the forward pass, and the state that lanes=True carries must pass through it in full. Use pp=1 and cp=1",
            )
        self._turn = turn
        self._dims = _dims_of(source, job, example["batch"], self._there)
        loss = source.loss if turn is None else turn.loss_of(source.loss)
        return replace(source, model=as_one(source.model, self._forward), loss=_loss_of(loss))

    def _there(self, batch: Any) -> Any:
        return batch if self._turn is None else self._turn.there(batch)

    def _forward(self, model: Any, samples: Any) -> Any:
        """Call the model's forward with the state of lanes; without one, as in evaluation, only its outputs are returned."""
        if not _has_lanes(samples):
            outputs = call(model, self._there(samples), None)[0]
            return outputs if self._turn is None else self._turn.back(outputs, samples)
        assert self._dims is not None, "they are found before the model is built"
        leaves, form = tree_flatten(samples["carried"])
        state = [
            leaf.movedim(0, dim) for leaf, dim in zip(leaves, self._dims, strict=False) if isinstance(leaf, Tensor)
        ]
        outputs, carried = call(model, self._there(samples["batch"]), tree_unflatten(state, form) if state else None)
        outputs = outputs if self._turn is None else self._turn.back(outputs, samples["batch"])
        left, form = tree_flatten(carried)
        return LaneOutputs(
            outputs, tree_unflatten([leaf.movedim(dim, 0) for leaf, dim in zip(left, self._dims, strict=True)], form)
        )

    # -- the state ---------------------------------------------------------------------------------

    def rows(self, places: Sequence[int], samples: Any) -> Any:
        """Return the state of some lanes before the step, along the first dimension; None before the first one."""
        if not self._now:
            return None
        first = next(iter(self._now.values()))
        zeros = [torch.zeros_like(leaf) for leaf in first]  # of lanes of other ranks, whose samples are only looked at
        states = [self._now.get(place, zeros) for place in places]
        leaves = [torch.stack([leaf[index] for leaf in states]) for index in range(len(first))]
        starts = samples.get("starts") if isinstance(samples, Mapping) else None
        if starts is not None:
            keep = [~starts.to(leaf.device).bool().view(-1, *[1] * (leaf.dim() - 1)) for leaf in leaves]
            leaves = [leaf * mask for leaf, mask in zip(leaves, keep, strict=True)]
        return tree_unflatten(leaves, self._form)

    def keep(self, places: Sequence[int], outputs: Any) -> None:
        """Keep the state that a micro-batch leaves for the next step."""
        if not places or not isinstance(outputs, LaneOutputs):
            return
        leaves, self._form = tree_flatten(outputs.carried)
        rows = [leaf.detach().unbind(0) for leaf in leaves]
        for row, place in enumerate(places):
            self._next[place] = [leaf[row].clone() for leaf in rows]

    def _commit(self) -> None:
        if self._next:
            self._now, self._next = self._next, {}

    # -- checkpoints -------------------------------------------------------------------------------

    def state(self) -> Any:
        """Return the state of this rank's lanes as it stands; None where there is none."""
        self._commit()
        if not self._now:
            return None
        places = sorted(self._now)
        leaves = [
            torch.stack([self._now[place][index] for place in places]) for index in range(len(self._now[places[0]]))
        ]
        return {"count": self._count, "places": places, "carried": tree_unflatten(leaves, self._form)}

    def resume(self, states: Sequence[Any], device: torch.device) -> None:
        """Set the state of all lanes to that which the ranks of a checkpoint held."""
        self._now, self._next, self._step = {}, {}, -1
        for state in states:
            leaves, self._form = tree_flatten(state["carried"])
            self._count = state["count"]
            rows = [leaf.to(device).unbind(0) for leaf in leaves]
            self._now |= {place: [leaf[row] for leaf in rows] for row, place in enumerate(state["places"])}


class LaneBatch:
    """A batch whose samples come with the state of their lanes."""

    dataset = None
    """Samples of other steps have no state yet."""

    def __init__(self, batch: Any, lanes: CarriedLanes) -> None:
        self._batch, self._lanes = batch, lanes
        self._places = {int(index): place for place, index in enumerate(batch.shares(0, 1, 1)[0])}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._batch, name)

    def samples(self, indices: Indices | Sequence[int]) -> Any:
        """Return samples and the state of their lanes before the step."""
        samples = self._batch.samples(indices)
        return {"batch": samples, "carried": self._lanes.rows(self.places(indices), samples)}

    def places(self, indices: Indices | Sequence[int]) -> list[int]:
        """Return the lanes of samples."""
        return [self._places[int(index)] for index in np.asarray(indices).tolist()]

    def keep(self, indices: Indices, outputs: Any) -> None:
        """Keep the state that the forward of these samples leaves for the next step."""
        self._lanes.keep(self.places(indices), outputs)


def _has_lanes(samples: Any) -> bool:
    return type(samples) is dict and samples.keys() == {"batch", "carried"}


def _loss_of(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(loss)
    def of_outputs(outputs: Any, batch: Any) -> Any:
        inner = outputs.outputs if isinstance(outputs, LaneOutputs) else outputs
        return loss(inner, batch["batch"] if _has_lanes(batch) else batch)

    return of_outputs


def call(model: Any, batch: Any, carried: Any) -> tuple[Any, Any]:
    """Call a forward of (batch, carried), or of what it takes of the batch by name or place, and the state after it.

    Raises:
        ModelError: it takes no second argument, or does not return outputs and a state.
    """
    names = [*inspect.signature(type(model).forward).parameters][1:]
    if len(names) < 2:
        raise ModelError(
            "lanes",
            f"the forward of {type(model).__name__} takes {', '.join(names)}. With lanes, use forward(batch, carried)",
        )
    if names[0] == "batch":
        result = model(batch, carried)
    elif isinstance(batch, Mapping):
        keywords = {name: value for name, value in batch.items() if name in names and name != "labels"}
        extra = "carried" if "carried" in names else next((name for name in names if name not in keywords), names[-1])
        result = model(**keywords, **{extra: carried})
    else:
        inputs = (batch[0], *batch[2:]) if isinstance(batch, tuple | list) else (batch,)
        place = names.index("carried") if "carried" in names else 1
        result = model(*inputs[:place], carried)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ModelError(
            "lanes",
            f"the forward of {type(model).__name__} returns a {type(result).__name__}. With lanes, return (outputs, carried): first the outputs, then the state of the next step",
        )
    return result


def _carried_on(plan: Blueprint, lanes: Any, number: int) -> Any:
    """Return the state that a forward leaves of some lanes: on the meta device, and on the host where its code looks at values.

    Raises:
        ModelError: it fails on both.
    """
    for device in ("meta", "cpu"):
        batch = map_tensors(lanes, operator.methodcaller("to", device))
        try:
            with torch.no_grad(), torch.device(device):
                return call(plan.module if device == "meta" else _with_values(plan), batch, None)[1]
        except ModelError:
            raise
        except Exception as error:  # of the user's own code, which may raise anything
            words = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    raise ModelError(
        "lanes", f"the forward fails on {number} lanes without a state ({words}): carried is None in the first step"
    )


def _with_values(plan: Blueprint) -> nn.Module:
    """Return a copy of a model on the host, with its values."""
    module = deep_copy(plan.module, {}).to_empty(device="cpu")
    host = torch.device("cpu")
    with torch.no_grad():
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            value.copy_(plan.materialize(name, host))
    return module


def _dims_of(source: Source, job: Job, example: Any, there: Callable[[Any], Any]) -> list[int]:
    """Return the dimension of the lanes in each tensor of the state that a forward leaves."""
    plan = build_blueprint(source, job)
    dtype = next(
        (parameter.dtype for parameter in plan.module.parameters() if parameter.is_floating_point()), torch.float32
    )
    sample = cast_floating(first_of(example), dtype)
    count, shapes = num_samples(sample) or 1, []
    for number in (2, 3):
        carried = _carried_on(plan, there(rows_of(sample, [0] * number, count)), number)
        shapes.append([leaf.shape if isinstance(leaf, Tensor) else None for leaf in tree_leaves(carried)])
    dims = []
    for two, three in zip(*shapes, strict=True):
        candidates = [dim for dim, (a, b) in enumerate(zip(two or (), three or (), strict=True)) if (a, b) == (2, 3)]
        if len(candidates) != 1:
            raise ModelError(
                "lanes",
                f"a tensor of the state is of shape {[*(two or ())]} for two lanes and {[*(three or ())]} for three, so the part of each lane is not known. Use tensors with one dimension of lanes",
            )
        dims += candidates
    return dims
