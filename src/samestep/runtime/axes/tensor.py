"""Tensor parallelism on real modules (twin of `strategies/tensor.py`): hooks around modules that keep their classes.

`independence/tensor_plan.py` finds which modules a plan cuts, and how. They compute with their own code on their part of the
weights; `copy` and `reduce` are placed at the boundaries:

    column   input through `copy`                      output cut along its last dimension
    row      bias held back, output through `reduce`   then the bias is added, once
    vocab    tokens of other ranks give zeros          output through `reduce`; a head's logits stay cut
        gather   a column cut whose output is gathered
    sum      a whole weight used on a cut tensor       used as it is: its gradient is summed once a step
    shared   a column cut of fewer heads than ranks    the rows of one head of the whole weight
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.building.families import is_transposed
from samestep.building.loss import IGNORED_LABEL, RunFunction, class_numbers, cross_entropy, run_uncompiled
from samestep.building.loss_result import Loss
from samestep.building.predictions import at_least_float32, prediction_of, target_of, with_prediction
from samestep.building.torch_seams import num_dispatch_modes
from samestep.examination.traced_model import TracedModel
from samestep.independence.tensor_plan import is_head
from samestep.models.spec import is_below
from samestep.program.program import Program
from samestep.runtime.axes import sequence
from samestep.runtime.axes.folded_hooks import after_forward, before_forward
from samestep.runtime.axes.rank_crossings import RankCrossing, moved
from samestep.runtime.axes.weight_gradients import postpone_weights, separable
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh


def apply(traced: TracedModel, program: Program, mesh: Mesh) -> None:
    """Install `copy` and `reduce` around every module that the program's model cuts.

    Collective over `tp` in each forward and backward, see [Note: collective calls].
    """
    if program.step.layout.tp == 1:
        return
    model, analysis = traced.module, traced.analysis
    cut = {p.name.rpartition(".")[0] for p in program.step.model.params if p.cut is not None}
    cut |= {a.rpartition(".")[0] for p in program.step.model.params if p.cut is not None for a in p.aliases}
    group = mesh.groups["tp"]
    copies = sequence.Shared(group, "keep", "sum")
    parts = _Boundaries(
        lambda path: RankCrossing(path, group, "keep", "sum", functools.partial(copies, path), is_shared=True),
        lambda module, path: RankCrossing(path, group, "sum", "keep", _sum_of_product(module, group, path)),
    )
    within = _Boundaries(None, lambda _, path: sequence.scattering(group, path))
    by_columns = {path for path, style in analysis.cut_styles.items() if style not in ("row", "sum")}
    shared = {path: heads for path, heads in analysis.shareable_heads.items() if heads < mesh.size("tp")}
    cuts_sequence = functools.partial(_cuts_sequence, program)
    for path, style in analysis.cut_styles.items():
        module = model.get_submodule(path)
        if style != "sum" and (path in cut or path in shared):
            if is_head(module, style) and not program.step.cuts_loss:
                style = "gather"
            boundaries = within if cuts_sequence(path) else parts
            if path not in analysis.copied:
                boundaries = replace(boundaries, entering=None)
            if path in shared:
                _around_shared(module, path, mesh, boundaries, shared[path])
            else:
                _AROUND[style](module, path, mesh, boundaries)
    for path in sorted(analysis.copied - by_columns):
        _enter(model.get_submodule(path), path, within if cuts_sequence(path) else parts)
    for path in separable(program.step):
        if not cuts_sequence(path):
            postpone_weights(model.get_submodule(path), copies.postponed_gradients_of)
    for path, name, divisor in analysis.counts[mesh.size("tp")]:
        module = model.get_submodule(path)
        setattr(module, name, getattr(module, name) // divisor)
    sequence.apply(traced, program, mesh)


def _cuts_sequence(program: Program, path: str) -> bool:
    """Return whether the input and output of a cut module are at boundaries of sequence parallelism."""
    if not program.step.layout.sequence_parallel:
        return False
    layers = [layer for layer in program.step.model.layers if layer.is_block]
    is_within = any(is_below(path, block) for layer in layers for block in layer.modules)
    return is_within and not any(is_below(path, part) for layer in layers for part in layer.whole_parts)


@dataclass(frozen=True, slots=True)
class _Boundaries:
    """Functions that make the crossings of a cut module's input and output."""

    entering: Callable[[str], RankCrossing] | None
    """None where the input does not cross: under sequence parallelism the part around the module has gathered it."""
    leaving: Callable[[nn.Module, str], RankCrossing]


def _enter(module: nn.Module, path: str, boundaries: _Boundaries) -> None:
    """Let the first argument of a module cross."""
    if boundaries.entering is not None:
        crossing = boundaries.entering(path)
        before_forward(module, lambda _, args, kwargs: ((crossing(args[0]), *args[1:]), kwargs))


def _sum_of_product(module: nn.Module, group: dist.ProcessGroup, path: str) -> Callable[[Tensor], Tensor] | None:
    """Return how the output of a module whose hooks are not folded yet is summed in its place; None if it is no product."""
    is_product = type(module).forward is nn.Linear.forward and "forward" not in vars(module)
    return functools.partial(reduce_product, group=group, owner=path) if is_product else None


def _around_column(module: nn.Module, path: str, mesh: Mesh, boundaries: _Boundaries) -> None:
    _enter(module, path, boundaries)


def _around_shared(module: nn.Module, path: str, mesh: Mesh, boundaries: _Boundaries, heads: int) -> None:
    """Make a projection compute the one head of keys or values that this rank's queries need, from the whole weight."""
    assert isinstance(module, nn.Linear)
    index = mesh.index("tp") * heads // mesh.size("tp")
    _enter(module, path, boundaries)
    _replace_weights(module, lambda param: param.chunk(heads)[index])


def _around_gather(module: nn.Module, path: str, mesh: Mesh, boundaries: _Boundaries) -> None:
    _around_column(module, path, mesh, boundaries)
    group = mesh.groups["tp"]
    gathered = RankCrossing(path, group, "gather_last", "own_last")
    after_forward(module, lambda _, args, output: gathered(output), prepend=True)


def _around_row(module: nn.Module, path: str, mesh: Mesh, boundaries: _Boundaries) -> None:
    """Hold the bias back while the module runs, and add it once to the sum."""
    tensors: list[Tensor | None] = []
    leave = boundaries.leaving(module, path)
    is_linear = type(module).forward is nn.Linear.forward
    if is_linear and module._parameters.get("bias") is None:
        after_forward(module, lambda _, args, output: leave(output), prepend=True)
        return
    # GPT-2's linear layers need a bias, and code of the user's own may.
    may_lack = is_linear and not is_transposed(module)

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        bias = module._parameters.get("bias")
        tensors.append(bias)
        none = None if bias is None or may_lack else bias.new_zeros(())
        module._parameters["bias"] = none  # type: ignore[assignment]

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        bias = tensors.pop()
        module._parameters["bias"] = bias  # type: ignore[assignment]
        if output is None:
            return None
        total = leave(output)
        return total if bias is None else total + bias

    before_forward(module, before)
    after_forward(module, after, always_call=True, prepend=True)


def _around_vocab(module: nn.Module, path: str, mesh: Mesh, boundaries: _Boundaries) -> None:
    """Make an embedding look up the tokens of this rank, and a head compute this rank's logits."""
    if isinstance(module, nn.Linear):
        _around_column(module, path, mesh, boundaries)
        return
    assert isinstance(module, nn.Embedding)
    size = module.num_embeddings // mesh.size("tp")
    first = mesh.index("tp") * size
    if module.padding_idx is not None:
        padding = module.padding_idx - first
        module.padding_idx = padding if 0 <= padding < size else None
    elsewhere: list[Tensor] = []
    leave = boundaries.leaving(module, path)

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        tokens = args[0] - first
        elsewhere.append((tokens < 0) | (tokens >= size))
        return (tokens.masked_fill(elsewhere[-1], 0), *args[1:]), kwargs

    def after(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        return leave(output.masked_fill(elsewhere.pop()[..., None], 0.0))

    before_forward(module, before)
    after_forward(module, after, prepend=True)


def _replace_weights(module: nn.Module, used: Callable[[nn.Parameter], Tensor]) -> None:
    """Make a module compute with a function of its weights, evaluated in each forward."""
    params: dict[str, nn.Parameter | None] = {}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        for name, param in list(module._parameters.items()):
            if param is not None:
                params[name] = param
                module._parameters[name] = used(param)  # type: ignore[assignment]

    def after(module: nn.Module, args: Any, output: Any) -> None:
        for name, param in params.items():
            module._parameters[name] = param
        params.clear()

    before_forward(module, before)
    after_forward(module, after, always_call=True, prepend=True)


_AROUND: dict[str, Callable[[nn.Module, str, Mesh, _Boundaries], None]] = {
    "column": _around_column,
    "qkv": _around_column,
    "gather": _around_gather,
    "row": _around_row,
    "vocab": _around_vocab,
}


# -- the boundaries, and the loss on cut logits ----------------------------------------------------


def reduce_product(x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """Return x, a product of matrices that nothing else reads, with the sum over the group in its place.

    The backward of a product does not read the product, so autograd goes on with the gradient of the sum as that of x, and needs
    no function for it. Where a dispatch mode has seen the product it may keep it as it was, as a selective checkpoint of the layout
    or of the model's code does, so x stays as it is there. Collective over `group`, see [Note: collective calls].
    """
    if num_dispatch_modes() or not x.is_contiguous():
        return moved(x, group, owner, "sum", "keep")
    with owned(owner):
        dist.all_reduce(x.detach(), group=group)
    return x


class _CutCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits cut by vocabulary, which keeps only their exponentials for the backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup, run: RunFunction) -> Tensor:
        size = logits.shape[-1]
        columns = labels - dist.get_rank(group) * size
        elsewhere = (columns < 0) | (columns >= size)
        column = columns.masked_fill(elsewhere, 0)[:, None]
        largest = at_least_float32(logits.amax(dim=-1))
        with owned("loss.largest"):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        powers, sums = run(_powers_of, logits, largest, column, elsewhere)
        with owned("loss.sums"):
            dist.all_reduce(sums, group=group)
        ignored = labels == IGNORED_LABEL
        ctx.save_for_backward(powers, sums[0], column, elsewhere, ignored)
        ctx.run, ctx.dtype = run, logits.dtype
        return (sums[0].log() - sums[1]).masked_fill(ignored, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        powers, total, column, elsewhere, ignored = ctx.saved_tensors
        gradient = gradients[0].expand_as(total).masked_fill(ignored, 0.0)
        return ctx.run(_gradient_of_cut, powers, total, column, elsewhere, gradient, ctx.dtype), None, None, None


def _powers_of(logits: Tensor, largest: Tensor, column: Tensor, elsewhere: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(x - m) of a rank's logits, and of each row its sum and x[label] - m, 0 where another rank has the label."""
    shifted = at_least_float32(logits) - largest[:, None]
    right = shifted.gather(-1, column)[:, 0].masked_fill(elsewhere, 0.0)
    powers = shifted.exp_()
    return powers, torch.stack([powers.sum(dim=-1), right])


def _gradient_of_cut(
    powers: Tensor, total: Tensor, column: Tensor, elsewhere: Tensor, tensor: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of a rank's logits, given that of each row's loss."""
    gradient = powers * (tensor / total)[:, None]
    return gradient.scatter_add_(-1, column, -tensor.masked_fill(elsewhere, 0.0)[:, None]).to(dtype)


def cut_cross_entropy(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup, run: RunFunction = run_uncompiled
) -> Tensor:
    """Return the summed cross entropy of rows whose logits are cut by vocabulary; labels of -100 do not count.

    logits [N, V / tp], labels [N]. With m the largest logit of a row: log(sum exp(x - m)) + m - x[label], each sum
    taken over all ranks; its gradient by x is exp(x - m) / sum exp(x - m), less 1 at the label.

    Collective over `group`, see [Note: collective calls].
    """
    run = run if torch.is_grad_enabled() else run_uncompiled
    # A graph makes the wider logits of each row where it needs them; uncompiled they are made once for all that reads them.
    scores = at_least_float32(logits) if run is run_uncompiled else logits
    loss: Tensor = _CutCrossEntropy.apply(scores, labels, group, run)
    return loss


def cuts_logits(program: Program) -> bool:
    """Return whether the loss gets logits that are cut by vocabulary."""
    return program.step.layout.tp > 1 and program.step.cuts_loss and program.step.model.logit_rows > 0


def cut_loss(mesh: Mesh, run: RunFunction, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the sum and the count of `loss.cross_entropy`, from logits cut by vocabulary.

    Collective over `tp`, see [Note: collective calls].
    """
    logits = prediction_of(outputs)
    labels = class_numbers(target_of(batch), logits)
    total = cut_cross_entropy(logits.flatten(0, -2), labels.flatten(), mesh.groups["tp"], run)
    return total, (labels != IGNORED_LABEL).sum()


def loss_of(loss: Loss, program: Program, mesh: Mesh, run: RunFunction) -> Loss:
    """Return the loss of this rank's logits; in chunks each part of the logits knows itself that it is cut.

    `run` calls the functions of logits that samestep has written.
    """
    if program.step.layout.loss_chunk is not None:
        return loss
    if cuts_logits(program):
        return functools.partial(cut_loss, mesh, run)
    return loss if loss is not cross_entropy or run is run_uncompiled else functools.partial(cross_entropy, run=run)


def whole_logits(outputs: Any, program: Program, mesh: Mesh) -> Any:
    """Return outputs with whole logits, gathered where they are cut by vocabulary.

    Collective over `tp` where they are cut, see [Note: collective calls].
    """
    if not cuts_logits(program):
        return outputs
    return with_prediction(
        outputs, moved(prediction_of(outputs), mesh.groups["tp"], "logits", "gather_last", "own_last")
    )
