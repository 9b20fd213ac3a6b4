"""A plain torch loop over the same model, data and optimizer, with which one device is compared.

```python
for batch in batches:
    loss_sum, count = loss(model(batch), batch)
    (loss_sum / count).backward()
    clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
```
The model is the user's: the build function called plainly, or a copy of the instance. Only drawn values are copied from
our blueprint, by name, since there they are functions of the seed and the name. So a buffer or a loaded weight to which
our blueprint gives a wrong value, on one device and in every layout alike, is found here; so is a wrong boundary of
packed documents, which have transformers' mask of all pairs of tokens here. The loop shares with our runs only the
conditions of a comparison: float64, the model's float32 islands raised to it, the dropout masks, and the rounding of
states after an update by `numerics.optimizer_states`.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building import drawn_rows
from samestep.building.families import EXPERT_WAY, ONE_BY_ONE_WAY, expert_configuration
from samestep.building.loss_result import is_plain_sum, loss_result, whole_loss
from samestep.building.model import call_model, give_labels
from samestep.building.model_changes import set_training
from samestep.building.model_loss import ModelLoss
from samestep.building.named_tensors import cast_floating, copy_module, map_attributes, tensors_of
from samestep.datasets import Batch, Dataset, batches
from samestep.examination.examine import Source
from samestep.program.codecs import CODECS, PLAIN, is_factored
from samestep.program.step import StepSpec
from samestep.proof import comparison
from samestep.proof.comparison import Comparison, Limit
from samestep.proof.held_tensors import HeldTensor, copy_whole
from samestep.proof.observation import Observation, PlainSteps
from samestep.proof.verdict import Cause
from samestep.randomness.mode import Draw, DropoutMode, place_samples
from samestep.runtime.axes import precision
from samestep.runtime.codecs.codec import codec_of
from samestep.runtime.run import Run
from samestep.runtime.weights.pieces import Piece
from samestep.tracing.batch_norms import without_own_groups
from samestep.tracing.checkpointed import replaced_checkpoint, without_reentry
from samestep.trees import map_tensors
from samestep.wings import required

WHAT = "plain torch"
"""The name of the check."""


def follow(run: Run, source: Source, dataset: Dataset, seen: Observation) -> PlainSteps:
    """Take the steps of one device's observation in a plain loop; `run` is that device's run, after its last step."""
    steps = PlainSteps()
    try:
        if run.held.is_apart:
            return _follow_apart(run, source, dataset, seen)
        model = _model(run, source, steps)
        start = {name: param.detach().clone() for name, param in trained_params(model).items()}
        unused = _take_steps(model, run, source, dataset, seen, steps)
        _update(model, run, start, source, seen, steps, unused)
    except Exception as error:  # the user's code, in which anything may fail
        return PlainSteps(hindrance=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return steps


def _follow_apart(run: Run, source: Source, dataset: Dataset, seen: Observation) -> PlainSteps:
    """Take the steps of independently trained replicas, and of the outer weights that they start from."""
    built = PlainSteps()
    models = [_model(run, source, built) for _ in range(1 + run.job.numerics.replicas)]

    def loss(model: nn.Module, batch: Batch, indices: Any) -> tuple[Tensor, float]:
        return _loss(model, run, source, run.labelled(batch).samples(indices), batch.step, indices)

    plain_contributions = _contributions(run, source)
    steps: PlainSteps = required("slow_links", "plain_replicas").take_steps(
        models, loss, run.job, dataset, seen, plain_contributions
    )
    return replace(steps, other_values=built.other_values)


def _contributions(run: Run, source: Source) -> PlainContributions | None:
    """Return the coder of contributions in the loop; None where a job has no codec."""
    step = run.program.step
    if step.contributions is None or step.sharing.codec == PLAIN:
        return None
    assert source.prepared is not None
    return PlainContributions(step, source.prepared.blueprint.canonical)


def _model(run: Run, source: Source, steps: PlainSteps) -> nn.Module:
    """Return the user's model in float64, with our blueprint's values of its drawn tensors."""
    assert source.prepared is not None
    ours, job = source.prepared.blueprint, run.job
    model = (
        copy_module(source.model)
        if isinstance(source.model, nn.Module)
        else drawn_rows.call(source.model, job.train.seed)
    )
    for name, tensor in {tensor.name: tensor.tensor for tensor in tensors_of(model)}.items():
        if name not in ours.canonical:
            continue
        value = ours.materialize(name, torch.device("cpu"))
        if ours.canonical[name] in ours.drawn:
            tensor.data.copy_(value)
        elif not torch.equal(value.double(), tensor.detach().cpu().double()):
            steps.other_values.append(name)
    model = model.double().to(run.place.device)
    for prefix, module in model.named_modules():
        map_attributes(prefix, module, lambda _, tensor: tensor.double() if tensor.is_floating_point() else tensor)
        if (config := expert_configuration(module)) is not None:
            setattr(config, EXPERT_WAY, ONE_BY_ONE_WAY)  # grouped products know no float64
    without_own_groups(model)
    if isinstance(source.loss, ModelLoss):
        give_labels(model)
    place_samples(model, run.assembly.model.spec.masks)
    set_training(model)
    return model


def trained_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights that take a gradient, by name."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def _take_steps(
    model: nn.Module, run: Run, source: Source, dataset: Dataset, seen: Observation, steps: PlainSteps
) -> list[set[str]]:
    """Take the steps with the same SGD as one device; record the parameters without a gradient in each step."""
    unused: list[set[str]] = []
    params, limit = trained_params(model), run.job.optimizer.clip_norm
    optimizer = torch.optim.SGD(params.values(), lr=seen.learning_rate, momentum=0.9)
    contributions = _contributions(run, source)
    for batch in batches(dataset, run.job):
        optimizer.zero_grad()
        loss, without = _backward(model, run, source, batch, params, contributions)
        unused.append(without)
        steps.unused.append(sorted(without))
        steps.losses.append(loss)
        steps.gradients.append(copy_whole({name: gradient_of(param) for name, param in params.items()}))
        norm = torch.nn.utils.clip_grad_norm_(params.values(), math.inf if limit is None else limit)
        steps.norms.append(float(norm))
        for name in without:  # a codec feeds the losses of earlier gradients back
            params[name].grad = None
        if not math.isnan(loss):
            optimizer.step()
        _round_states(run, source, optimizer, params)
        steps.weights.append(copy_whole(params))
    return unused


def _backward(
    model: nn.Module,
    run: Run,
    source: Source,
    batch: Batch,
    params: Mapping[str, nn.Parameter],
    contributions: PlainContributions | None,
) -> tuple[float, set[str]]:
    """Compute the gradients of the mean loss of a whole batch; return the loss, and the weights without a gradient."""
    if contributions is None:
        loss_sum, count = _loss(
            model, run, source, run.labelled(batch).samples(batch.indices), batch.step, batch.indices
        )
        if not count:  # every label is masked, so the step is skipped
            return math.nan, set(params)
        (loss_sum / count).backward()
        return float(loss_sum.detach() / count), {name for name, param in params.items() if param.grad is None}
    if len(run.assembly.objective.names.terms) > 1:
        raise ValueError("each contribution would need the counts of all of them, which this loop does not know before")
    total, counted, unused = 0.0, 0.0, set(params)
    for index, indices in enumerate(batch.shares(0, 1, contributions.number)):
        loss_sum, count = _loss(model, run, source, run.labelled(batch).samples(indices), batch.step, indices)
        loss_sum.backward()
        total, counted = total + float(loss_sum.detach()), counted + float(count)
        unused &= {name for name, param in params.items() if param.grad is None}
        contributions.add(index, params)
    if not counted:
        return math.nan, set(params)
    contributions.finish(params, counted)
    return total / counted, unused


def _loss(model: nn.Module, run: Run, source: Source, samples: Any, step: int, indices: Any) -> tuple[Tensor, float]:
    """Return the sum of the loss over samples, and their count: of the whole one at once, unless the job groups samples whose statistics it takes."""
    device = run.place.device
    # A reentrant checkpoint would repeat its forward outside of the mode that draws the masks.
    checkpoints = replaced_checkpoint(lambda begin, function: begin(function), without_reentry)
    moved = cast_floating(map_tensors(samples, lambda tensor: tensor.to(device)), torch.float64)
    numbers, balances = [], []
    size = run.job.numerics.batch_norm_group if run.assembly.model.spec.couples_samples else None
    for start in range(0, len(indices), size or len(indices)):
        rows = slice(start, start + (size or len(indices)))
        part = map_tensors(moved, operator.itemgetter(rows)) if size else moved
        draw = Draw(run.job.train.seed, step, torch.as_tensor(indices[rows], device=device))
        with precision.RaiseIslands(), DropoutMode(model, draw), checkpoints:
            outputs = call_model(model, part, plainly=True)
            numbers.append(loss_result(source.loss(outputs, part)))
            count = numbers[-1].only[1] if len(numbers[-1].terms) == 1 else len(indices[rows])
            if (balance := run.assembly.objective.balance) is not None:
                balances.append(balance(outputs, count, 1.0))
    total, counted = whole_loss(numbers, len(indices))
    if is_plain_sum(source.loss):
        total = total * len(indices)
    return sum(balances, total), counted


def gradient_of(param: Tensor) -> Tensor:
    """Return the gradient of a weight, zeros where it has none."""
    return torch.zeros_like(param) if param.grad is None else param.grad


@torch.no_grad()
def _update(
    model: nn.Module,
    run: Run,
    start: Mapping[str, Tensor],
    source: Source,
    seen: Observation,
    steps: PlainSteps,
    unused: Sequence[set[str]],
) -> None:
    """Take the steps of the job's optimizer on one device's gradients, leaving out weights to which the plain loop
    gives none."""
    params = trained_params(model)
    for name, value in start.items():
        params[name].copy_(value)
    optimizer = source.optimizer(list(params.items()))
    for index in range(len(seen.updated)):
        gradients = comparison.whole_of(comparison.unclip_gradients(seen, index))
        for name, param in params.items():
            param.grad = None if name in unused[index] else gradients[name].view_as(param).to(param, copy=True)
        optimizer.step()
        _round_states(run, source, optimizer, params)
        steps.updated.append(copy_whole(params))


def _round_states(
    run: Run, source: Source, optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]
) -> None:
    """Round the optimizer's states as the job holds them between two updates."""
    packing = run.assembly.weights.updater.packing
    assert source.prepared is not None
    canonical = source.prepared.blueprint.canonical
    for name, param in params.items() if packing is not None else ():
        assert packing is not None
        piece = Piece(canonical[name], 0, param.numel(), param, functools.partial(gradient_of, param), is_uncut=True)
        if param in optimizer.state:
            packing.pack(piece, optimizer.state[param])
            packing.widen(piece, optimizer.state[param])


def compare(observation: Observation, limit: Limit) -> list[Comparison]:
    """Compare one device with its plain loop: losses, norms, gradients and weights of every step, and the updates."""
    steps = observation.plain
    if steps is None or steps.hindrance:
        return []
    errors = []
    for index, seen in enumerate(observation.steps):
        numbers = Comparison(WHAT, index + 1, allowance=limit(WHAT, "", index + 1))
        for what, ours, theirs in (("loss", seen.loss, steps.losses[index]), ("norm", seen.norm, steps.norms[index])):
            numbers.note(what, comparison.relative(ours, theirs), 0)
        gradients = comparison.unclip_gradients(observation, index)
        errors.append(numbers)
        errors += _tensors("gradient", index, steps.gradients[index], gradients, limit)
        errors += _tensors("weight", index, steps.weights[index], seen.weights, limit)
    # The job's optimizer is compared with the loop where one model is trained.
    for index, updated in enumerate(observation.updated if steps.updated else ()):
        errors += _tensors("update", index, steps.updated[index], updated, limit)
    return errors


def _tensors(
    what: str, index: int, theirs: list[HeldTensor], tensors: list[HeldTensor], limit: Limit
) -> list[Comparison]:
    named = [[HeldTensor(f"{what} of {t.name}", t.values, t.places) for t in side] for side in (theirs, tensors)]
    return [comparison.compare_held(WHAT, index + 1, named[0], [(0, named[1])], limit)]


def cause(observation: Observation, first: Comparison) -> tuple[Cause, str]:
    """Return the cause of the first difference from the plain loop, with its place and the wrong values, if known."""
    misfit = first.misfits[0]
    steps = observation.plain
    assert steps is not None
    text = f"{misfit.name} in step {misfit.step} of one device is off by {misfit.error:.1e}"
    if steps.other_values:
        more = f" and {len(steps.other_values) - 1} more" if len(steps.other_values) > 1 else ""
        return (
            Cause.PLAIN,
            f"{steps.other_values[0]}{more} has not the value that the build function gives it; {text}",
        )
    kind, _, name = misfit.name.partition(" of ")
    unused = dict(enumerate(steps.unused, 1)).get(
        misfit.step or 0, ()
    )  # none is known where replicas are trained independently
    if kind in ("weight", "update") and name in unused:
        return Cause.PLAIN, f"{text}: a plain torch loop has no gradient for it in that step, and leaves it as it is"
    return Cause.PLAIN, f"{text}, on the same samples, with the same masks"


class PlainContributions:
    """The gradients of the contributions to each step, and the losses of their codes: one whole weight after another is coded, without
    buckets, ranks or messages."""

    def __init__(self, step: StepSpec, canonical: Mapping[str, str]) -> None:
        """Follow the codec of a step; `canonical` gives the name in its model of each weight's name in the loop."""
        self.number = step.sharing.replicas
        self._rank, self._canonical = step.sharing.rank, canonical
        self._blocks = {name: step.sharing.blocks.get(known, 1) for name, known in canonical.items()}
        self._spec = CODECS[step.sharing.codec]
        self._codec = None if self._spec.factors else codec_of(step.sharing.codec)
        self._lost: dict[tuple[str, int], Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._directions: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, index: int, params: Mapping[str, nn.Parameter]) -> None:
        """Add the decoded gradients of one contribution, and clear them."""
        for name, param in params.items():
            self._sums[name] = self._sums.get(name, 0.0) + self._coded(name, index, gradient_of(param))
            param.grad = None

    @torch.no_grad()
    def finish(self, params: Mapping[str, nn.Parameter], count: float) -> None:
        """Set gradients to their decoded sums, divided by the count."""
        for name, param in params.items():
            total = self._sums.pop(name)
            factors = self._rank and is_factored(total.shape, self._rank)
            param.grad = (self._projected(name, total) if factors else self._coded(name, self.number, total)) / count

    def _coded(self, name: str, index: int, gradient: Tensor) -> Tensor:
        """Return a gradient as it is decoded, and keep the loss of its code."""
        if self._codec is None:
            return gradient.detach()
        values = gradient.detach().reshape(1, -1)
        lost = self._lost.setdefault((name, index), torch.zeros_like(values)) if self._spec.feeds_back else None
        size = self._spec.size_bytes(values.numel(), self._blocks[name])
        wire = torch.zeros((1, size), dtype=torch.uint8, device=values.device)
        self._codec.encode(values, self._blocks[name], wire, lost)
        decoded = torch.zeros_like(values)
        self._codec.decode(wire, self._blocks[name], decoded)
        return decoded.view_as(gradient)

    def _projected(self, name: str, total: Tensor) -> Tensor:
        """Return the projection of a sum of contributions, and keep the remainder."""
        powersgd = required("slow_links", "powersgd")
        rows = total.detach().reshape(len(total), -1) + self._lost.get((name, self.number), 0.0)
        if name not in self._directions:
            drawn = powersgd.first_directions(self._canonical[name], self._rank, rows.shape[1])
            self._directions[name] = drawn.to(rows)
        left = self._directions[name] @ rows.T
        powersgd.orthonormalise([left[None]])
        right = left @ rows
        decoded = left.T @ right
        self._lost[name, self.number] = rows - decoded
        powersgd.next_directions([right[None]], [self._directions[name][None]])
        return decoded.view_as(total)
