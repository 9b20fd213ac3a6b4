"""Invariants checked during training: ranks that must hold equal values do.

    by their bits   the weights of ranks that hold the same pieces: replicas get the same reduced gradients
                    step, samples, loss and gradient norm: all ranks
    by tolerance    weights that a tensor cut leaves whole: its ranks compute them redundantly
    once            what the ranks of each group sent in the first step that is checked: kind, dtype and bytes of every
                    collective, since a backend adds up what it is given, and checks nothing

Bits are compared by sums of words made where the weights are (`state/fingerprints.py`). Whether max(x) = min(x) over a group is one all_reduce of (x, -x), so that a check sends
a few hundred bytes a tensor, in groups of its own. Only after a difference do ranks send more, to name the one that
differs.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from samestep.errors import DriftError
from samestep.program.holding import Holding
from samestep.program.ops import OpKind
from samestep.program.program import LedgerRow
from samestep.runtime.assembly import Assembly
from samestep.runtime.ledger import Ledger, outside_step
from samestep.runtime.processes.mesh import Mesh, group_among
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.step_report import StepReport
from samestep.runtime.weights.pieces import Piece
from samestep.state.fingerprints import word_sums

TOLERANCE = 1e-3
"""Largest relative difference of redundantly computed weights; a missing reduction soon exceeds it."""


class DriftMonitor:
    """Checks the invariants of one run. Every rank makes one, and all ranks call its methods alike."""

    def __init__(self, assembly: Assembly) -> None:
        """Make the groups to compare in.

        Collective over the world, see [Note: collective calls].
        """
        mesh = self._mesh = assembly.parallel.mesh
        pieces = assembly.weights.updater.pieces
        step = assembly.parallel.program.step
        self._has_compared_sent = False
        holdings = {param.name: step.holding(param) for param in step.model.params}
        cut_over = {axis for axis, ranks in step.layout.model_axes.items() if ranks > 1}
        self._redundant = [piece for piece in pieces if {*holdings[piece.name].replicated_over} == cut_over]
        of_axis: dict[str, list[Piece]] = {}
        for piece in pieces:
            of_axis.setdefault(holdings[piece.name].data_axis, []).append(piece)
        shares = step.contributions
        replica = (
            mesh.index(shares.axis) if shares is not None and shares.ranks > 1 and step.sharing.trains_apart else 0
        )
        digests = {axis: f"{replica} {_digest_of(mesh, same, holdings)}" for axis, same in of_axis.items()}
        groups = _groups_of_equals(mesh, digests)
        self._replicas = [(same, groups[axis]) for axis, same in of_axis.items()]
        """Pieces, with the group of the ranks that hold the same ones: experts have other replicas than the rest."""
        self._cut_ranks = _groups_of_equals(mesh, {"model": str(mesh.members("model"))})["model"] if cut_over else None

    def watch(self, take_step: Callable[[], StepReport], indices: np.ndarray[Any, Any]) -> StepReport:
        """Take a step on the samples of `indices`, then compare; the first such step also compares what was sent.

        Collective over the world, see [Note: collective calls].

        Raises:
            DriftError: ranks that must agree do not.
        """
        if self._has_compared_sent:
            report = take_step()
        else:
            self._has_compared_sent = True
            with Ledger() as sent:
                report = take_step()
            with outside_step():
                self.check_sent(report.step, sent)
        with outside_step():
            self.check(report, indices)
        return report

    def check(self, report: StepReport, indices: np.ndarray[Any, Any]) -> None:
        """Compare weights, samples, loss and gradient norm after a step.

        Collective over the world, see [Note: collective calls].

        Raises:
            DriftError: it names the tensor and the rank that differs from most.
        """
        names: list[str] = []
        values: list[Any] = []
        for pieces, group in self._replicas:
            # Under offload the values are on the host, and ranks compare on their devices.
            prints = torch.stack([word_sums(piece.master()) for piece in pieces]) if pieces else torch.zeros(0)
            odd = _differing(prints.to(self._mesh.device), group)
            names += [pieces[index].name for index in odd]
            values += prints[odd].tolist() if odd else []
        if self._cut_ranks is not None and not names and self._redundant:
            sizes = torch.stack([_project(piece.master()) for piece in self._redundant]).to(self._mesh.device)
            diverged = _diverged_rows(sizes, self._cut_ranks)
            names = [self._redundant[index].name for index in diverged]
            values = sizes[diverged].tolist() if diverged else []
        facts = {
            "the step": report.step,
            "the samples": xxhash.xxh3_64_intdigest(indices.tobytes()) >> 1,
            "the loss": _bits(report.loss),
            "the gradient norm": _bits(report.grad_norm),
        }
        numbers = torch.tensor([*facts.values(), len(names)], dtype=torch.int64, device=self._mesh.device)
        both = torch.cat([numbers, -numbers])
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        most, least = both.chunk(2)
        unequal = [name for name, high, low in zip(facts, most[:-1], -least[:-1], strict=True) if high != low]
        if unequal or int(most[-1]):
            reports = {name: (value,) for name, value in facts.items() if name in unequal}
            self._raise_disagreement(report.step, reports | dict(zip(names, map(tuple, values), strict=True)))

    def check_sent(self, step: int, ledger: Ledger) -> None:
        """Compare what the ranks of each group sent in a step.

        Collective over the world, see [Note: collective calls].

        Raises:
            DriftError: it names the collective in which two ranks took part with different kinds, dtypes or sizes.
        """
        of_group = {group: _comparable(rows) for group, rows in ledger.rows.items()}
        of_group = {group: rows for group, rows in of_group.items() if rows}
        prints = self._gather_by_group(
            {group: xxhash.xxh3_64_intdigest(repr(rows).encode()) for group, rows in of_group.items()}
        )
        groups = dict.fromkeys(group for digests in prints for group in digests)
        odd = [group for group in groups if len({prints[rank].get(group) for rank in _ranks_of(group)}) > 1]
        if not odd:
            return
        lists_of = self._gather_by_group(
            {group: [*rows, ("nothing more", "", 0)] for group, rows in of_group.items() if group in odd}
        )
        ranks = _ranks_of(odd[0])
        lists = [lists_of[rank].get(odd[0], [("nothing", "", 0)]) for rank in ranks]
        differing = next(rows for rows in zip(*lists, strict=False) if len(set(rows)) > 1)
        words = [f"{kind} {dtype} {size or ''}".strip() for kind, dtype, size in differing]
        other = next(index for index, row in enumerate(words) if row != words[0])
        raise DriftError(
            "ranks-drift",
            f"in step {step} ranks {odd[0]} disagree on one collective, so its result is "
            f"wrong: rank {ranks[0]} with {words[0]}, rank {ranks[other]} with {words[other]} bytes",
        )

    def _gather_by_group(self, values: Any) -> list[Any]:
        return gather_values(values, self._mesh.size("world"))

    def _raise_disagreement(self, step: int, values: dict[str, tuple[Any, ...]]) -> None:
        """Raise an error that names the rank that differs from most of those that hold the same value.

        Raises:
            DriftError: always.
        """
        reports = self._gather_by_group(values)
        name = next(name for report in reports for name in report)
        holders = {rank: report[name] for rank, report in enumerate(reports) if name in report}
        most, count = Counter(holders.values()).most_common(1)[0]
        odd = [rank for rank, value in holders.items() if value != most]
        if 2 * count > len(holders):
            who = f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} against the other{'s' * (count > 1)}"
        else:
            who = f"ranks {', '.join(map(str, holders))} against each other"
        raise DriftError(
            "ranks-drift",
            f"ranks disagree on {name} after step {step}: {who}; samestep verify finds the cause",
        )


def _comparable(rows: list[LedgerRow]) -> list[tuple[str, str, int]]:
    """Return what must be equal on a group's ranks: no messages between two of them, no sizes that differ by rank."""
    return [
        (row.kind, row.dtype, 0 if row.kind == OpKind.ALL_TO_ALL else row.size_bytes)
        for row in rows
        if row.kind not in (OpKind.SEND, OpKind.RECV)
    ]


def _ranks_of(group: str) -> list[int]:
    """Return the ranks of a group, by its name in the ledger."""
    return [int(rank) for rank in group.partition(" ")[0].split(",")]


def _digest_of(mesh: Mesh, pieces: Sequence[Piece], holdings: Mapping[str, Holding]) -> str:
    """Return a digest of which elements of which weights these pieces are."""
    places = [
        (
            piece.name,
            piece.start,
            piece.stop,
            [mesh.index(axis) for axis in (*holding.sharded_over, *holding.replicated_over)],
        )
        for piece in pieces
        if (holding := holdings[piece.name])
    ]
    return xxhash.xxh3_64_hexdigest(repr(places).encode())


def _groups_of_equals(mesh: Mesh, values: Mapping[str, str]) -> dict[str, dist.ProcessGroup | None]:
    """Make for each name the group of the ranks with equal values for it; None for a rank that has no equal.

    Collective over the world: every rank calls it, with or without a value for a name; if one does not, the others wait
    until the time limit.
    """
    reports: list[Mapping[str, str]] = gather_values(values, mesh.size("world"))
    groups: dict[str, dist.ProcessGroup | None] = dict.fromkeys(values)
    for name in dict.fromkeys(name for report in reports for name in report):
        equals: dict[str, list[int]] = {}
        for rank, report in enumerate(reports):
            if name in report:
                equals.setdefault(report[name], []).append(rank)
        parts = [tuple(ranks) for ranks in equals.values() if len(ranks) > 1]
        group = group_among(parts, "watch", mesh.timeout_s) if parts else None
        groups |= {name: group} if name in values else {}
    return groups


def _differing(prints: Tensor, group: dist.ProcessGroup | None) -> list[int]:
    """Return the rows that are not the same on all ranks of the group."""
    if group is None or not len(prints):
        return []
    both = torch.stack([prints, -prints])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return (both[0] != -both[1]).any(dim=1).nonzero().flatten().tolist()


def _diverged_rows(sizes: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Return the rows whose projections differ between the ranks by more than the tolerance of their norm."""
    both = torch.stack([sizes, -sizes])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    spread = (both[0] + both[1])[:, 0]
    return (spread > TOLERANCE * both[0, :, 1].clamp_min(1e-30)).nonzero().flatten().tolist()


@torch.no_grad()
def _project(value: Tensor) -> Tensor:
    """Return a projection of a tensor and its norm, float64 [2]."""
    flat = value.detach().flatten().double()
    index = torch.arange(len(flat), device=flat.device)
    signs = 1.0 - 2.0 * ((index * 2654435761 >> 16) & 1)
    return torch.stack([(flat * signs).sum(), flat.norm()])


def _bits(number: float) -> int:
    """Return the upper 63 bits of a float64 number as an integer whose negative is in range too."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0]) >> 1
