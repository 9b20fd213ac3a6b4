"""The sum that a step minimises: what a loss returns for a micro-batch, as one number whose backward gives the step's gradients.

A loss is a sum over samples or tokens, and their count. Backward runs on the sum, divided by a power of two near the
count, which loses no bit. All ranks learn the true count after the last micro-batch, in the one all_reduce that also
carries the loss, the gradient norm and the flags; the gradients are divided by it then. So nothing is ever a mean
of means, and a user's loss need not know its count before its forward.

```
what the loss returns ─► sums        one sum and one count: of one term, of several, or of all samples of the step
                      ─► balance     + the loss that balances experts
                      ─► exchanges   + 0 x what the backwards of other ranks wait for
```

A loss that closes over the model may read whole weights. A part of one would give another number on each rank, and so would a value that
a forward has computed from the samples of one rank: the first call is watched for both (`watching_reads`). Gradients that the loss sends to the
weights by such ways are found by `guards/loss_trials.py`. A proof trains a copy of an instance, of which a loss that closes over the
instance sees the first weights alone.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samestep.building.loss import RunFunction, check_results_of, cross_entropy, is_known_sum, with_graph
from samestep.building.loss_result import LossResult, as_number
from samestep.building.named_tensors import set_attributes
from samestep.building.outside_reads import FirstRead
from samestep.building.over_samples import mark_of
from samestep.errors import ModelError
from samestep.examination.examine import Loss, Source
from samestep.examination.traced_model import TracedModel
from samestep.models.spec import LossNames
from samestep.program.program import Program
from samestep.runtime.axes import expert, forward_state, loss_terms, tensor, whole_batch
from samestep.runtime.axes.exchanging_calls import NOTHING_LEFT_OUT, JoinedExchanges
from samestep.runtime.loss_watch import LossWatch
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weights import parameter_hooks
from samestep.state.snapshot import modules_of
from samestep.trees import tensors_in, tree_leaves


@dataclass(frozen=True, slots=True)
class LossPart:
    """The loss of one micro-batch on one rank."""

    own: Tensor
    """The sum that the loss has returned, with a graph."""
    total: Tensor
    """The sum from which the backward starts: with the loss that balances experts."""
    count: Tensor | int
    """What the sum is divided by, of the whole step."""
    is_constant: bool
    """Whether the loss depends on no weight, so that its gradients are no use of one."""
    left_out: frozenset[int]
    """The ids of the weights that the backward reaches, though the loss does not need them."""

    def numbers(self, result: LossResult, names: LossNames, like: Tensor) -> Tensor:
        """Return the total and its count, followed by the sum and the count of each named term and value that the loss found.

        The tensor [2 + `StepSpec.num_reported`] has the dtype and the device of `like`.
        """
        both = as_number(self.total.detach(), like), as_number(self.count, like)
        return torch.stack([*both, *result.numbers(names, like)])


@dataclass(frozen=True, slots=True)
class Objective:
    """The sum that a step minimises."""

    loss: Loss
    sums: loss_terms.OwnSamples | whole_batch.WholeBatch
    """What makes one sum and one count of what the loss returns, and which samples it sees at once."""
    balance: expert.Balance | None
    """The auxiliary loss that balances experts, if the job has one."""
    exchanges: JoinedExchanges | None
    """The exchanges in backwards that this rank's loss may not need, if there are such."""
    nominal_count: float
    """A power of two near the count of a whole step: dividing by it loses no bit."""
    divides_exactly: bool
    """Whether hooks see how large gradients are, so that the backward must divide by the count itself."""
    names: LossNames
    """The names of what the loss returns, for which the step's scalars have places."""
    watch: LossWatch
    """What the loss does in its calls, where a layout divides its samples or tokens."""
    hooks: tuple[Callable[..., Any], ...] = ()
    """Hooks on parameters that see the gradients of a whole step."""

    @classmethod
    def of(
        cls,
        source: Source,
        traced: TracedModel,
        program: Program,
        mesh: Mesh,
        exchanges: JoinedExchanges | None,
        example: Any,
        run: RunFunction,
    ) -> Objective:
        """Return the sum that a step of a program minimises; the global batch has samples like those of `example`.

        `run` calls the functions of logits that samestep has written.
        """
        loss, names, watch = source.loss, program.step.model.loss_names, LossWatch()
        if loss is not cross_entropy:
            seen = watching_reads(loss, source, traced.module, program)
            loss = watched(seen, program, watch) if mark_of(source.loss) is None else check_results_of(seen)
        loss = tensor.loss_of(loss, program, mesh, run)
        sums: loss_terms.OwnSamples | whole_batch.WholeBatch
        if (asked := mark_of(source.loss)) is not None:
            keeps = bool(traced.analysis.states) or traced.spec.couples_samples
            sums = whole_batch.WholeBatch(program, mesh, asked, keeps_state=keeps)
        else:
            sums = loss_terms.sums_of(source.loss, program, mesh, watch)
        count = _nominal_count(example, program.step.global_batch, by_samples=len(names.terms) > 1)
        hooks = parameter_hooks.of_whole_gradients(traced.blueprint, program)
        exactly = traced.spec.hooks_scale or bool(hooks)
        balance = expert.Balance.of(traced, program, mesh)
        return cls(loss, sums, balance, exchanges, count, exactly, names, watch, hooks)

    def part(
        self,
        result: LossResult,
        outputs: Any,
        batch: Any,
        part: loss_terms.Other,
        others: Callable[[], Iterable[loss_terms.Other]],
        weight: float,
    ) -> LossPart:
        """Return the loss of a micro-batch from what the loss function has found in the model's outputs, as it was given them.

        `own` is this rank's part of the batch, and `others` returns those of the later micro-batches; `weight` is 0 for a sample that
        only fills an empty one.

        Collective over the axes of a balancing loss or of several terms, see [Note: collective calls].
        """
        total, count = self.sums.summed(result, batch, part, others)
        alone = with_graph(total, result, outputs)
        is_constant = not total.requires_grad and self.balance is None
        total, left_out = alone, NOTHING_LEFT_OUT
        if self.balance is not None:
            total = total + self.balance(outputs, count, weight)
        if self.exchanges is not None:
            total, left_out = self.exchanges.joined(total)
        return LossPart(alone, total, count, is_constant, left_out)


def watched(loss: Loss, program: Program, watch: LossWatch) -> Loss:
    """Return a loss whose results are in one form, watched in its calls where a layout divides samples or tokens."""
    is_divided = program.step.layout.dp_cp_size > 1 or program.step.num_microbatches > 1
    return check_results_of(loss, watch.result) if is_divided and not is_known_sum(loss) else check_results_of(loss)


def _nominal_count(example: Any, global_batch: int, *, by_samples: bool) -> float:
    """Return a power of two near the count of a step, from shapes alone: the same in every layout."""
    if by_samples:
        return float(2 ** round(math.log2(global_batch)))
    labels = example.get("labels") if isinstance(example, dict) else None
    if labels is None:
        labels = tree_leaves(example)[-1]
    each = labels.numel() / max(1, labels.shape[0]) if isinstance(labels, Tensor) and labels.dim() else 1.0
    return float(2 ** round(math.log2(max(1.0, global_batch * each))))


_VALUES = (Tensor, bool, int, float)


def watching_reads(loss: Loss, source: Source, module: nn.Module, program: Program) -> Loss:
    """Return the loss, whose first call must not read what `module`, which the run trains of an instance, has otherwise on each rank.

    Raises:
        ModelError: the returned function: it reads a weight of which ranks have parts, or a value that a forward has set.
    """
    layout, instance = program.step.layout, source.model
    if not isinstance(instance, nn.Module):
        return loss
    is_cut = layout.gathers_weights or any(degree > 1 for degree in layout.weight_axes.values())
    is_split = layout.world_size > 1 or bool(forward_state.splits(layout, program.step.num_microbatches))
    if source.owner is not None and not is_cut and not is_split:
        return loss
    watched = module if source.owner is not None else instance
    weights = [*watched.named_parameters()] if is_cut or source.owner is None else []
    values = _values_of(modules_of(loss), module)
    is_first = True

    @functools.wraps(loss)
    def first_watched(outputs: Any, batch: Any) -> Any:
        nonlocal is_first
        if not is_first:
            return loss(outputs, batch)
        is_first = False
        returned = {id(tensor) for tensor in tensors_in(outputs)}
        reads = FirstRead(
            [(name, weight) for name, weight in weights if not weight.is_meta and id(weight) not in returned]
        )
        with reads.mode:
            result = loss(outputs, batch)
        name, what = reads.name, "and each rank has a part of it"
        if not name:
            present = _values_of(modules_of(loss), module)
            name = next((path for path in present if present[path] is not values.get(path) and _names(loss, path)), "")
            what = "which each forward sets from its own samples"
        if name:
            what = what if source.owner is not None else "and a proof trains a copy of it"
            raise ModelError(
                "instance-read-elsewhere",
                f"the loss reads {name} of the model, {what}. Use a forward that returns the values for the loss. For a penalty on weights, "
                "use weight_decay.",
            )
        return result

    return first_watched


def _values_of(reached: nn.Module, model: nn.Module) -> dict[str, Any]:
    """Return the tensors and numbers in attributes of the parts of a model that a loss holds."""
    parts = {part: path for path, part in model.named_modules()}
    return {
        f"{parts[part]}.{name}".lstrip("."): value
        for part in reached.modules()
        if part in parts
        for name, value in set_attributes(part).items()
        if isinstance(value, _VALUES)
    }


def _names(loss: Loss, name: str) -> bool:
    """Return whether the code of a loss names an attribute, as far as it can be read."""
    code = getattr(inspect.unwrap(loss), "__code__", None)
    return code is None or name.rpartition(".")[2] in code.co_names
