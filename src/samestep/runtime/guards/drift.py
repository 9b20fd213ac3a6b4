"""Invariants checked during training: ranks that must hold equal values do.

    by their bits   the weights of ranks that hold the same pieces: replicas get the same reduced gradients
                    step, samples, loss and gradient norm: all ranks
    by tolerance    weights that a tensor cut leaves whole: its ranks compute them redundantly
    once            what the ranks of each group sent in the first step that is checked: kind, dtype and bytes of every
                    collective, since a backend adds up what it is given, and checks nothing

Bits are compared by sums of words made where the weights are (`state/fingerprints.py`). A check sends one hash for all weights that the same
ranks hold, and 16 bytes for each tensor that a cut leaves whole. Only after a difference do ranks send more, to name the tensor and the
rank that differs.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from samestep.errors import DriftError
from samestep.program.holding import Holding
from samestep.program.ops import OpKind
from samestep.program.program import LedgerRow
from samestep.runtime.assembly import Assembly
from samestep.runtime.ledger import Ledger, outside_step
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.processes.messages import gather_values
from samestep.runtime.step_report import StepReport
from samestep.runtime.weights.pieces import Piece
from samestep.state.fingerprints import word_sums

TOLERANCE = 1e-3
"""Largest relative difference of redundantly computed weights; a missing reduction soon exceeds it."""


class DriftMonitor:
    """Checks the invariants of one run. Every rank makes one, and all ranks call its methods alike."""

    def __init__(self, assembly: Assembly) -> None:
        """Note which weights this rank shares with others."""
        mesh = self._mesh = assembly.parallel.mesh
        pieces = assembly.weights.updater.pieces
        step = assembly.parallel.program.step
        self._has_compared_sent = False
        holdings = {param.name: step.holding(param) for param in step.model.params}
        cut_over = {axis for axis, ranks in step.layout.model_axes.items() if ranks > 1}
        redundant = [piece for piece in pieces if {*holdings[piece.name].replicated_over} == cut_over]
        self._redundant = {f"{mesh.members('model')} {piece.name}": piece for piece in redundant if cut_over}
        """Weights that the ranks of a tensor cut compute redundantly, by these ranks and name."""
        of_axis: dict[str, list[Piece]] = {}
        for piece in pieces:
            of_axis.setdefault(holdings[piece.name].data_axis, []).append(piece)
        shares = step.contributions
        model = mesh.index(shares.axis) if shares is not None and step.sharing.trains_apart else 0
        self._pieces = {f"{model} {axis} {_digest_of(mesh, same, holdings)}": same for axis, same in of_axis.items()}
        """Pieces by what they are: ranks with an equal key hold the same ones, of experts other ranks than of the rest."""

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
        facts = {
            "the step": report.step,
            "the samples": xxhash.xxh3_64_intdigest(indices.tobytes()),
            "the loss": _bits(report.loss),
            "the gradient norm": _bits(report.grad_norm),
        }
        prints = {key: torch.stack([word_sums(piece.master()) for piece in same]) for key, same in self._pieces.items()}
        bits = {key: xxhash.xxh3_64_intdigest(sums.cpu().numpy().tobytes()) for key, sums in prints.items()}
        sizes = {key: _project(piece.master()).tolist() for key, piece in self._redundant.items()}
        everyone = self._gather((facts | bits, sizes))
        reports = [report for report, _ in everyone]
        odd = _unequal(reports)
        if odd and odd[0] not in facts:
            names = {key: zip(self._pieces[key], prints[key].tolist(), strict=True) for key in odd if key in prints}
            reports = self._gather({f"{key} {piece.name}": row for key, rows in names.items() for piece, row in rows})
            odd = _unequal(reports)
        if not odd:
            reports = [sizes for _, sizes in everyone]
            odd = [key for key, values in _by_key(reports).items() if _have_diverged([*values.values()])]
        if odd:
            values = {rank: str(value) for rank, value in _by_key(reports)[odd[0]].items()}
            self._raise_disagreement(report.step, odd[0] if odd[0] in facts else odd[0].rpartition(" ")[2], values)

    def check_sent(self, step: int, ledger: Ledger) -> None:
        """Compare what the ranks of each group sent in a step.

        Collective over the world, see [Note: collective calls].

        Raises:
            DriftError: it names the collective in which two ranks took part with different kinds, dtypes or sizes.
        """
        of_group = {group: _comparable(rows) for group, rows in ledger.rows.items()}
        prints = {group: xxhash.xxh3_64_intdigest(repr(rows).encode()) for group, rows in of_group.items() if rows}
        everyone = self._gather(prints)
        odd = next(
            (
                group
                for group in dict.fromkeys(group for sent in everyone for group in sent)
                if len({everyone[rank].get(group) for rank in _ranks_of(group)}) > 1
            ),
            None,
        )
        if odd is None:
            return
        lists_of = self._gather([*of_group.get(odd, ()), ("nothing more", "", 0)])
        ranks = _ranks_of(odd)
        differing = next(
            rows for rows in zip(*(lists_of[rank] for rank in ranks), strict=False) if len({*map(tuple, rows)}) > 1
        )
        words = [f"{kind} {dtype} {size or ''}".strip() for kind, dtype, size in differing]
        other = next(index for index, row in enumerate(words) if row != words[0])
        raise DriftError(
            "ranks-drift",
            f"in step {step} ranks {odd} disagree on one collective, so its result is "
            f"wrong: rank {ranks[0]} with {words[0]}, rank {ranks[other]} with {words[other]} bytes",
        )

    def _gather(self, values: Any) -> list[Any]:
        return gather_values(values, self._mesh.size("world"))

    def _raise_disagreement(self, step: int, name: str, holders: Mapping[int, str]) -> None:
        """Raise an error that names the rank that differs from most of those that hold the same value.

        Raises:
            DriftError: always.
        """
        most, count = Counter(holders.values()).most_common(1)[0]
        odd = [rank for rank, value in holders.items() if value != most]
        if 2 * count > len(holders):
            who = f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} against the other{'s' * (count > 1)}"
        else:
            who = f"ranks {', '.join(map(str, holders))} against each other"
        raise DriftError(
            "ranks-drift", f"ranks disagree on {name} after step {step}: {who}; samestep verify finds the cause"
        )


def _by_key(reports: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Any]]:
    """Return the values of all ranks by key and rank."""
    values: dict[str, dict[int, Any]] = {}
    for rank, report in enumerate(reports):
        for key, value in report.items():
            values.setdefault(key, {})[rank] = value
    return values


def _unequal(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that have different values on the ranks that report them."""
    return [key for key, values in _by_key(reports).items() if len({*map(str, values.values())}) > 1]


def _have_diverged(sizes: Sequence[tuple[float, float]]) -> bool:
    """Return whether projections of a tensor, each in front of its norm, differ between ranks by more than the tolerance of the norm."""
    projections, norms = zip(*sizes, strict=True)
    return max(projections) - min(projections) > TOLERANCE * max(*norms, 1e-30)


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


@torch.no_grad()
def _project(value: Tensor) -> Tensor:
    """Return a projection of a tensor and its norm, float64 [2]."""
    flat = value.detach().flatten().double()
    index = torch.arange(len(flat), device=flat.device)
    signs = 1.0 - 2.0 * ((index * 2654435761 >> 16) & 1)
    return torch.stack([(flat * signs).sum(), flat.norm()])


def _bits(number: float) -> int:
    """Return the bits of a float64 number, of which NaN equals NaN."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])
