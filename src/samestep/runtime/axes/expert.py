"""Expert parallelism on real modules (twin of `strategies/expert.py`): rows are sent to the ranks of their experts.

A module of experts is called with rows, the experts chosen for each and their weights, and holds every weight of all its
experts in one tensor, experts along dimension 0. Such are those of transformers; a user's own model names its in
`expert_plan = ["blocks.*.experts"]`. The module goes on computing with its own code, on the experts that it is left with:

    called with   x [N, D]   chosen [N, K]   weights [N, K]         of this rank's samples
    runs on       x [M, D]   chosen [M, 1]   ones [M, 1]            rows of all ranks for this rank's experts
    returns       y [N, D] = sum over K of weights x what came back

The router's gradient comes from that sum, on the rank that has the token. Where nothing is sent to a rank it runs on one
row of zeros, which it drops, so that all ranks take part in every exchange of the backward, and every weight of an expert
has a gradient.

transformers computes experts by grouped matrix products, whose shapes do not depend on what is chosen, and which torch
has not in float64: there it goes from expert to expert, on one device too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.building.families import FamilyFacts
from samestep.building.loss import at_least_float32
from samestep.program.program import Program
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh
from samestep.tracing.experts import _compute, called_with
from samestep.tracing.traced_model import TracedModel

# -- carrying it out -------------------------------------------------------------------------------


def apply(traced: TracedModel, program: Program, mesh: Mesh) -> None:
    """Let each module of experts send its rows to the ranks that have their experts."""
    model, facts, found = traced.module, traced.facts, traced.analysis.experts
    if program.step.compute_dtype == "float64":
        _compute(model, found, facts.one_by_one_way)
    if program.step.layout.ep == 1:
        return
    for path, experts in found.counts.items():
        module = model.get_submodule(path)
        facts.set_experts(module, experts // mesh.size("ep"))
        module.forward = functools.partial(_dealt, module.forward, experts, mesh.groups["ep"], path)


def _dealt(forward: Any, num_experts: int, group: dist.ProcessGroup, path: str, *args: Any, **named: Any) -> Tensor:
    """Stand in for the forward of a module of experts."""
    x, chosen, weights = called_with(args, named)
    if torch.is_grad_enabled() and not x.requires_grad:
        x = x.detach().requires_grad_()  # else ranks without rows would have no part in the backward
    picks = chosen.flatten()
    order = picks.argsort(stable=True)
    sizes, comes = _exchange_counts(picks, num_experts, group, path)
    sent, received = torch.stack([sizes.sum(1), comes.sum(1)]).tolist()
    rows = _AllToAll.apply(x[order // chosen.shape[1]], sent, received, group, path)
    index = torch.arange(comes.shape[1], device=x.device).repeat(len(comes)).repeat_interleave(comes.flatten())
    back = _AllToAll.apply(_own(forward, rows, index, weights.dtype), received, sent, group, path)
    in_order = back[order.argsort()].view(*chosen.shape, -1)
    return (in_order * weights[..., None]).sum(dim=1).to(x.dtype)


def _own(forward: Any, rows: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute rows by this rank's experts, each by the one of its index; at least one row, which is then dropped."""
    count = len(rows)
    if not count:
        rows, index = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), index.new_zeros(1)
    return forward(rows, index[:, None], torch.ones(len(rows), 1, dtype=dtype, device=rows.device))[:count]


def _exchange_counts(picks: Tensor, num_experts: int, group: dist.ProcessGroup, path: str) -> tuple[Tensor, Tensor]:
    """Count the rows for each expert of each rank, [ep, E / ep], and those that come from each rank, [ep, E / ep]."""
    sizes = torch.bincount(picks, minlength=num_experts)
    comes = torch.empty_like(sizes)
    with owned(path):
        dist.all_to_all_single(comes, sizes, group=group)
    degree = dist.get_world_size(group)
    return sizes.view(degree, -1), comes.view(degree, -1)


@dataclass(frozen=True, slots=True)
class Balance:
    """The loss that wants all experts chosen alike: a sum, as the other loss is, of this rank's part."""

    coefficient: float
    top_k: int
    num_experts: int
    group: dist.ProcessGroup | None
    """Of all ranks; None for a single one."""
    copies: int
    """Ranks that count the same samples."""
    facts: FamilyFacts

    @classmethod
    def of(cls, traced: TracedModel, program: Program, mesh: Mesh) -> Balance | NoBalance:
        """Read what a transformers model asks for."""
        experts, model, facts = program.step.model.balanced_experts, traced.module, traced.facts
        coefficient = facts.balance_of(model)
        if not experts or not coefficient:
            return NoBalance()
        top_k = facts.setting(model, facts.experts_per_token)
        return cls(coefficient, top_k, experts, mesh.groups.get("world"), mesh.size("model"), facts)

    def added_to(self, loss_sum: Tensor, outputs: Any, count: Tensor | int, weight: float) -> Tensor:
        """Return the sum of both losses over a micro-batch. Collective over the world, as the part added here is."""
        return loss_sum + self(outputs, count, weight)

    def __call__(self, outputs: Any, count: Tensor | int, weight: float) -> Tensor:
        """Return this rank's part, times the count of the whole step. Collective over the world.

        `count` is what the other loss counts here, `weight` 0 for samples that stand in for none.
        """
        shares = [at_least_float32(logits).softmax(dim=-1) for logits in self.facts.router_scores(outputs)]
        picks = torch.cat([share.topk(self.top_k, dim=-1).indices.flatten() for share in shares])
        rows = sum(len(share) for share in shares)
        known = torch.tensor([rows, float(count)], dtype=torch.float64, device=picks.device)
        totals = weight * torch.cat([torch.bincount(picks, minlength=self.num_experts).double(), known])
        if self.group is not None:
            with owned("balance"):
                dist.all_reduce(totals, group=self.group)
        chosen, (rows_of_all, count_of_all) = totals[:-2], totals[-2:] / self.copies
        chosen = chosen / self.copies / rows_of_all
        mean = torch.stack([share.sum(dim=0) for share in shares]).sum(dim=0) / rows_of_all
        return self.coefficient * self.num_experts * count_of_all * (chosen.to(mean.dtype) * mean).sum()


class NoBalance:
    """Stands in for `Balance` where the job asks for no loss that balances experts."""

    def added_to(self, loss_sum: Tensor, outputs: Any, count: Tensor | int, weight: float) -> Tensor:
        """Return the loss as it is."""
        return loss_sum


class _AllToAll(torch.autograd.Function):
    """Send runs of rows to the ranks of a group, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, owner: str
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group, ctx.owner = sent, received, group, owner
        return _exchanged(rows, sent, received, group, owner)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _exchanged(gradients[0], ctx.received, ctx.sent, ctx.group, ctx.owner), None, None, None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, owner: str) -> Tensor:
    comes = rows.new_empty((sum(received), *rows.shape[1:]))
    with owned(owner):
        dist.all_to_all_single(comes, rows.contiguous(), received, sent, group=group)
    return comes
