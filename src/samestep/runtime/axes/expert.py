"""Expert parallelism on real modules (twin of `strategies/expert.py`): rows go to the ranks of their experts.

A module of experts is called with rows, the experts chosen for each row, and their weights; each of its parameters
holds all its experts along dimension 0. transformers' modules of experts do so; a user's own model names its modules in
`expert_plan = ["blocks.*.experts"]`. The module's own code then runs on the experts that this rank holds:

    called with   x [N, D]   chosen [N, K]   weights [N, K]         rows of this rank's samples
    runs on       x [M, D]   chosen [M, 1]   ones [M, 1]            rows of all ranks for this rank's experts
    returns       y [N, D] = sum over K of weights x combined rows

The router's gradient comes from that sum, on the rank that has the token. A rank that receives no rows takes part in
every exchange of the backward too, and its experts' weights have gradients of zeros. `tracing/experts.py` tests that a
user's module computes such a sum. transformers computes experts by grouped matrix products, whose shapes do not depend
on the choice. torch has none in float64: there each expert is computed in turn, on one device too.

A `RouteMode` records the experts chosen for each token in one forward, and replays them in another. A router takes the
k largest of its scores. Where two scores are nearly equal, one rounding sends a token to another expert, and everything
after it differs by far more than a rounding; in bf16 every batch has such tokens. That is no error, but it hides
errors. So a proof in the job's precision replays the choices of one device, weighted by the layout's scores; that a
layout chooses right is proven in float64 before, where scores are not that close. A sample that the canary runs again
during training (`guards/canary.py`) replays choices too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.building import families
from samestep.building.loss_result import as_number
from samestep.building.predictions import at_least_float32
from samestep.examination.traced_model import TracedModel
from samestep.program.program import Program
from samestep.randomness.masks import MaskSlice
from samestep.randomness.mode import Draw, DropoutMode
from samestep.runtime.axes.rank_crossings import GroupLine, through
from samestep.runtime.axes.step_part import RepeatedValues
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh
from samestep.tracing.checkpointed import ContextFn
from samestep.tracing.experts import _compute, call_again, check_experts, routing_arguments

# -- carrying it out -------------------------------------------------------------------------------


def apply(traced: TracedModel, program: Program, mesh: Mesh) -> None:
    """Make each module of experts dispatch its rows to the ranks that hold their experts."""
    model, of_experts = traced.module, traced.analysis.experts
    if program.step.compute_dtype == "float64":
        _compute(model, of_experts, families.ONE_BY_ONE_WAY)
    if program.step.layout.ep == 1:
        return
    layers = program.step.model.layers
    # In front of all that is trained nothing gathers weights for a backward, or exchanges anything in one.
    ahead = {dispatch.owner for layer in layers if not layer.has_backward for dispatch in layer.dispatches}
    for path, experts in of_experts.counts.items():
        module = model.get_submodule(path)
        if path not in of_experts.switchable and path in traced.analysis.expert_calls:
            value_of = functools.partial(traced.blueprint.materialize, device=torch.device("cpu"))
            check_experts(path, module, traced.analysis.expert_calls[path], value_of)
        setattr(module, families.EXPERT_COUNT, experts // mesh.size("ep"))
        module.forward = functools.partial(
            _dispatch_and_combine, module.forward, module, experts, mesh.groups["ep"], path, path not in ahead
        )


def _dispatch_and_combine(
    forward: Any,
    module: nn.Module,
    num_experts: int,
    group: dist.ProcessGroup,
    path: str,
    has_backward: bool,
    *args: Any,
    **named: Any,
) -> Tensor:
    """Replace the forward of a module of experts: dispatch rows, compute them, combine the results.

    Collective over `ep`, see [Note: collective calls].
    """
    x, chosen, weights = routing_arguments(args, named)
    again = functools.partial(call_again, forward, args, named)
    if has_backward and torch.is_grad_enabled() and not x.requires_grad:
        x = x.detach().requires_grad_()  # else ranks without rows would have no part in the backward
    picks = chosen.flatten()
    order = picks.argsort(stable=True)
    sent, received, received_sizes = _kept_or_counted(picks, num_experts, group, path)
    dispatch, combine = (
        functools.partial(_exchange_rows, *split, group=group, owner=path)
        for split in ((sent, received), (received, sent))
    )
    rows = through(x[order // chosen.shape[1]], dispatch, combine)
    index = (
        torch.arange(received_sizes.shape[1], device=x.device)
        .repeat(len(received_sizes))
        .repeat_interleave(received_sizes.flatten(), output_size=sum(received))
    )
    back = through(_own(again, module, rows, index, chosen, weights.dtype), combine, dispatch)
    in_order = back[order.argsort()].view(*chosen.shape, -1)
    return (in_order * weights[..., None]).sum(dim=1).to(x.dtype)


class _Counts(NamedTuple):
    """How many rows a dispatch exchanges."""

    sent: list[int]
    """To each rank of the group."""
    received: list[int]
    received_sizes: Tensor
    """Rows received from each rank for each of this rank's experts, int64 [ep, E / ep]."""


_COUNTED = RepeatedValues[_Counts]()
"""The counts of checkpointed forwards."""


def _kept_or_counted(picks: Tensor, num_experts: int, group: dist.ProcessGroup, path: str) -> _Counts:
    """Return how many rows are exchanged, for which the host waits; a repeated forward has kept it."""
    counts = _COUNTED.left()
    if counts is None:
        sizes, received_sizes = _exchange_counts(picks, num_experts, group, path)
        sent, received = torch.stack([sizes.sum(1), received_sizes.sum(1)]).tolist()
        counts = _Counts(sent, received, received_sizes)
    return _COUNTED.add(counts)


def recompute_contexts(degree: int) -> list[ContextFn]:
    """Return what makes the contexts of a checkpointed forward and of its repetition, if experts stand on several ranks."""
    return [_COUNTED.contexts] if degree > 1 else []


def _own(again: Any, module: nn.Module, rows: Tensor, index: Tensor, chosen: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute rows [M, D] with this rank's experts, that of each row's index.

    Without rows the experts compute a row of zeros without gradients, for the shape of their result, and their weights get
    gradients of zeros: those of that row might not be finite.
    """
    index = index.to(chosen.dtype)
    if len(rows):
        result: Tensor = again(rows, index[:, None], torch.ones(len(rows), 1, dtype=dtype, device=rows.device))
        return result
    with torch.no_grad():
        unit = torch.ones(1, 1, dtype=dtype, device=rows.device)
        shape = again(rows.new_zeros(1, rows.shape[1]), index.new_zeros(1, 1), unit)[:0]
    nothing: Tensor = _Nothing.apply(shape, rows, *(param for param in module.parameters() if param.requires_grad))
    return nothing


class _Nothing(torch.autograd.Function):
    """Returns an empty result; every other argument gets a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in others]
        return result.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes))


def _exchange_counts(picks: Tensor, num_experts: int, group: dist.ProcessGroup, path: str) -> tuple[Tensor, Tensor]:
    """Return the numbers of rows sent to each expert of each rank, and of rows received, both [ep, E / ep]."""
    sizes = _count_picks(picks, num_experts)
    received_sizes = GroupLine(group, path).all_to_all(sizes)
    degree = dist.get_world_size(group)
    return sizes.view(degree, -1), received_sizes.view(degree, -1)


def _count_picks(picks: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert is chosen, int64 [E]; `bincount` would let the host wait for a GPU."""
    return picks.new_zeros(num_experts, dtype=torch.int64).scatter_add_(0, picks, torch.ones_like(picks))


@dataclass(frozen=True, slots=True)
class Balance:
    """The auxiliary loss that balances experts, as this rank's part of a sum, like the main loss."""

    coefficient: float
    top_k: int
    num_experts: int
    group: dist.ProcessGroup | None
    """Group of all ranks; None for a single rank."""
    copies: int
    """Number of ranks that count the same samples."""

    @classmethod
    def of(cls, traced: TracedModel, program: Program, mesh: Mesh) -> Balance | None:
        """Return the loss that the model's configuration asks for, if it does."""
        experts, coefficient = program.step.model.balanced_experts, families.balance_of(traced.module)
        if not experts or not coefficient:
            return None
        top_k = families.setting(traced.module, families.EXPERTS_PER_TOKEN)
        return cls(coefficient, top_k, experts, mesh.groups.get("world"), mesh.size("model"))

    def __call__(self, outputs: Any, count: Tensor | int, weight: float) -> Tensor:
        """Return this rank's part of the loss, multiplied by the count of the whole step.

        `count` is what the main loss counts in this micro-batch; `weight` is 0 for a sample that only fills an empty
        one.

        Collective over the world, see [Note: collective calls].
        """
        shares = [at_least_float32(logits).softmax(dim=-1) for logits in getattr(outputs, families.ROUTER_OUTPUTS)]
        picks = torch.cat([share.topk(self.top_k, dim=-1).indices.flatten() for share in shares])
        rows = sum(len(share) for share in shares)
        chosen = _count_picks(picks, self.num_experts).double()
        totals = weight * torch.cat([chosen, *(as_number(number, chosen).view(1) for number in (rows, count))])
        if self.group is not None:
            with owned("balance"):
                dist.all_reduce(totals, group=self.group)
        chosen, (rows_of_all, count_of_all) = totals[:-2], totals[-2:] / self.copies
        chosen = chosen / self.copies / rows_of_all
        mean = torch.stack([share.sum(dim=0) for share in shares]).sum(dim=0) / rows_of_all
        return self.coefficient * self.num_experts * count_of_all * (chosen.to(mean.dtype) * mean).sum()


def _exchange_rows(sent: list[int], received: list[int], rows: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """Send `sent[i]` of the rows [M, D] to rank i of the group; return those that it sends, [sum(received), D]."""
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    with owned(owner):
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result


Routes = dict[tuple[str, int, int, int], np.ndarray[Any, np.dtype[np.int16]]]
"""The chosen experts, int16 [tokens, k], by (module, index of its call, index of the choice in that call, sample)."""

_CHOOSING = (torch.topk, Tensor.topk)


def tokens_of_first(tensor: Tensor, parts: int) -> Tensor:
    """Return the first part of the tokens of choices [samples, tokens, k]: all, where a rank replays what it has recorded itself."""
    return tensor.chunk(parts, dim=1)[0]


class RouteMode(DropoutMode):
    """A dropout mode that also replays the choices in `routes`, or records them there: by default while it is empty.

    `own` returns this rank's tokens of choices [samples, tokens, k], of which so many ranks hold a part each.
    """

    sees_all = True

    def __init__(
        self,
        model: nn.Module,
        draw: Draw,
        part: MaskSlice | None,
        routes: Routes,
        own: Callable[[Tensor, int], Tensor],
        replays: bool | None = None,
    ) -> None:
        super().__init__(model, draw, part)
        self._routes = routes
        self._replays = bool(routes) if replays is None else replays
        self._own = own

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _CHOOSING:
            return self._choose_top_k(func, *args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _choose_top_k(self, func: Callable[..., Any], scores: Tensor, k: int, dim: int = -1, **named: Any) -> Any:
        """Return the top k of scores [tokens of all samples, experts] along the last dimension, recorded or replayed."""
        frame, samples = self._frames[-1], self._draw.samples.tolist()
        if scores.dim() != 2 or dim not in (-1, 1) or len(scores) % len(samples):
            return func(scores, k, dim, **named)
        place = (frame.name, frame.entry, frame.num_choices)
        frame.num_choices += 1
        if not self._replays:
            choice = func(scores, k, dim, **named)
            for sample, picks in zip(samples, choice.indices.view(len(samples), -1, k), strict=True):
                self._routes[*place, sample] = picks.cpu().numpy().astype(np.int16)
            return choice
        noted = torch.from_numpy(np.stack([self._routes[*place, sample] for sample in samples]))
        parts = noted.shape[1] * len(samples) // len(scores)
        picks = self._own(noted, parts).reshape(-1, k).to(scores.device, torch.int64)
        return torch.return_types.topk((scores.gather(1, picks), picks))
