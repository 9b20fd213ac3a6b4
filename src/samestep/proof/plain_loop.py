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
from samestep.building.families import facts_of
from samestep.building.loss_result import loss_result, whole_loss
from samestep.building.model import call_model, give_labels
from samestep.building.model_loss import ModelLoss, Rule
from samestep.building.named_tensors import cast_floating, copy_module, map_attributes, tensors_of
from samestep.building.training_modules import set_training
from samestep.datasets import Batch, Dataset, batches
from samestep.examination.examine import Source
from samestep.program.codecs import PLAIN
from samestep.proof import comparison, plain_replicas
from samestep.proof.comparison import Comparison, Limit
from samestep.proof.held_tensors import HeldTensor, copy_whole
from samestep.proof.observation import Observation, PlainSteps
from samestep.proof.plain_contributions import PlainContributions
from samestep.proof.verdict import Cause
from samestep.randomness.mode import Draw, DropoutMode, place_samples
from samestep.runtime.axes import precision
from samestep.runtime.run import Run
from samestep.runtime.weights.pieces import Piece
from samestep.tracing.batch_norms import without_own_groups
from samestep.tracing.checkpointed import replaced_checkpoint, without_reentry
from samestep.trees import map_tensors

WHAT = "plain torch"
"""The name of the check."""


def follow(run: Run, source: Source, dataset: Dataset, seen: Observation) -> PlainSteps:
    """Take the steps of one device's observation in a plain loop; `run` is that device's run, after its last step."""
    steps = PlainSteps()
    try:
        if run.replicas.are_apart:
            return _follow_apart(run, source, dataset, seen)
        model = _model(run, source, steps)
        start = {name: param.detach().clone() for name, param in _trained_params(model).items()}
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

    assert source.prepared is not None
    canonical = source.prepared.blueprint.canonical

    def part_of(name: str) -> int:
        return run.program.step.sharing.part_of(canonical[name])

    made = _contributions(run, source)
    steps = plain_replicas.take_steps(models, loss, run.job, dataset, seen, made, part_of)
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
    for name, tensor in {one.name: one.tensor for one in tensors_of(model)}.items():
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
        facts = facts_of(module)
        if (config := facts.expert_configuration(module)) is not None:
            setattr(config, facts.expert_way, facts.one_by_one_way)  # grouped products know no float64
    without_own_groups(model)
    if isinstance(source.loss, ModelLoss):
        give_labels(model)
    place_samples(model, run.assembly.model.spec.masks)
    set_training(model)
    return model


def _trained_params(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def _take_steps(
    model: nn.Module, run: Run, source: Source, dataset: Dataset, seen: Observation, steps: PlainSteps
) -> list[set[str]]:
    """Take the steps with the same SGD as one device; record the parameters without a gradient in each step."""
    unused: list[set[str]] = []
    params, limit = _trained_params(model), run.job.optimizer.clip_norm
    optimizer = torch.optim.SGD(params.values(), lr=seen.learning_rate, momentum=0.9)
    contributions = _contributions(run, source)
    for batch in batches(dataset, run.job):
        optimizer.zero_grad()
        loss, without = _backward(model, run, source, batch, params, contributions)
        unused.append(without)
        steps.unused.append(sorted(without))
        steps.losses.append(loss)
        steps.gradients.append(copy_whole({name: _gradient(param) for name, param in params.items()}))
        norm = torch.nn.utils.clip_grad_norm_(params.values(), math.inf if limit is None else limit)
        steps.norms.append(float(norm))
        for name in without:  # a codec feeds the losses of earlier gradients back
            params[name].grad = None
        if not math.isnan(loss):
            optimizer.step()
        _round_states(run, source, optimizer, params, batch.step)
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
    checkpoints = replaced_checkpoint(lambda begin, own: begin(own), without_reentry)
    moved = cast_floating(map_tensors(samples, lambda tensor: tensor.to(device)), torch.float64)
    found, balances = [], []
    size = run.job.numerics.coupled_samples if run.assembly.model.spec.couples_samples else None
    for start in range(0, len(indices), size or len(indices)):
        rows = slice(start, start + (size or len(indices)))
        part = map_tensors(moved, operator.itemgetter(rows)) if size else moved
        draw = Draw(run.job.train.seed, step, torch.as_tensor(indices[rows], device=device))
        with precision.RaiseIslands(), DropoutMode(model, draw), checkpoints:
            outputs = call_model(model, part, plainly=True)
            found.append(loss_result(source.loss(outputs, part)))
            none = torch.zeros((), dtype=torch.float64, device=device)
            count = found[-1].only[1] if len(found[-1].terms) == 1 else len(indices[rows])
            balances.append(run.assembly.objective.balance.added_to(none, outputs, count, 1.0))
    total, counted = whole_loss(found, len(indices))
    if isinstance(source.loss, ModelLoss) and source.loss.rule is Rule.SUM:
        total = total * len(indices)
    return total + torch.stack(balances).sum(), counted


def _gradient(param: Tensor) -> Tensor:
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
    params = _trained_params(model)
    for name, value in start.items():
        params[name].copy_(value)
    optimizer = source.optimizer(list(params.items()))
    for index in range(len(seen.updated)):
        given = comparison.whole_of(comparison.unclip_gradients(seen, index))
        for name, param in params.items():
            param.grad = None if name in unused[index] else given[name].view_as(param).to(param, copy=True)
        optimizer.step()
        _round_states(run, source, optimizer, params, index)
        steps.updated.append(copy_whole(params))


def _round_states(
    run: Run, source: Source, optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter], step: int
) -> None:
    """Round the optimizer's states as the job holds them between two updates."""
    packing = run.assembly.weights.updater.packing
    assert source.prepared is not None
    canonical = source.prepared.blueprint.canonical
    for name, param in params.items() if packing is not None else ():
        assert packing is not None
        whole = Piece(canonical[name], 0, param.numel(), param, functools.partial(_gradient, param), is_uncut=True)
        if param in optimizer.state:
            packing.pack(whole, optimizer.state[param], step)
            packing.widen(whole, optimizer.state[param])


def compare(one: Observation, limit: Limit) -> list[Comparison]:
    """Compare one device with its plain loop: losses, norms, gradients and weights of every step, and the updates."""
    steps = one.plain
    if steps is None or steps.hindrance:
        return []
    found = []
    for index, seen in enumerate(one.steps):
        numbers = Comparison(WHAT, index + 1, allowance=limit(WHAT, "", index + 1))
        for what, mine, theirs in (("loss", seen.loss, steps.losses[index]), ("norm", seen.norm, steps.norms[index])):
            numbers.note(what, comparison.relative(mine, theirs), 0)
        gradients = comparison.unclip_gradients(one, index)
        found.append(numbers)
        found += _tensors("gradient", index, steps.gradients[index], gradients, limit)
        found += _tensors("weight", index, steps.weights[index], seen.weights, limit)
    # The job's optimizer is compared with the loop where one model is trained.
    for index, updated in enumerate(one.updated if steps.updated else ()):
        found += _tensors("update", index, steps.updated[index], updated, limit)
    return found


def _tensors(what: str, index: int, theirs: list[HeldTensor], mine: list[HeldTensor], limit: Limit) -> list[Comparison]:
    named = [[HeldTensor(f"{what} of {t.name}", t.values, t.places) for t in side] for side in (theirs, mine)]
    return [comparison.compare_held(WHAT, index + 1, named[0], [(0, named[1])], limit)]


def cause(one: Observation, first: Comparison) -> tuple[Cause, str]:
    """Return the cause of the first difference from the plain loop, with its place and the wrong values, if known."""
    misfit = first.misfits[0]
    steps = one.plain
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
        return Cause.IDLE, f"{text}: a plain torch loop has no gradient for it in that step, and leaves it as it is"
    return Cause.PLAIN, f"{text}, on the same samples, with the same masks"
