"""Ring attention: the tokens that each rank of `cp` holds, and what it computes with the keys and values that come by.

Liu et al. 2023, arXiv:2310.01889. Each of N ranks keeps its queries. Keys and values pass from rank to rank, so that rank r
has those of rank r - h after h hops, and the softmax over all keys is put together from those over the keys of each hop:

    S_h = scale Q K_h'       L_h = log sum exp S_h       O_h = softmax(S_h) V_h
    L = log sum exp of the L_h over h                    O = sum over h of exp(L_h - L) O_h

In the backward every part of P is exp(S_h - L), so keys and values pass by once more, and their gradients travel with them:

    D = sum over features of dO O        dS_h = P_h (dO V_h' - D)
    dQ = scale sum over h of dS_h K_h    dK_h = scale dS_h' Q      dV_h = P_h' dO      (of one rank, added up along the ring)

A causal attention needs about half of all pairs. With contiguous slices the last rank computes nearly all of its own, and
the first almost none. So where 2N divides the tokens, a rank holds two runs, one from the head of the sequence and one from
its tail (Brandon et al. 2023, arXiv:2311.09431; the order of Llama 3's context parallelism, arXiv:2407.21783):

    N = 2, 8 tokens      rank 0: 0 1 . . . . 6 7     rank 1: . . 2 3 4 5 . .

Then each visit other than the first is one rectangle without a mask, of half of the pairs, on every rank:

    keys of an earlier rank    their head run is in the past of all queries, their tail run in the future of all
    keys of a later rank       all of them are in the past of the tail run, and in the future of the head run

Where neighbours exchange heads and a ring connects such groups (Fang and Zhao 2024, arXiv:2405.07719), a group takes the place of a
rank above, and its ranks hold equal parts of what it has, one behind the other.
"""

from __future__ import annotations

from typing import NamedTuple


class SlicePlacement(NamedTuple):
    """The rule by which the tokens of a sequence are divided among the ranks of `cp`."""

    length: int
    """Tokens of the whole sequence."""
    degree: int
    is_head_tail: bool = False
    """Whether a rank holds a run from the head and one from the tail of the sequence, instead of one run."""
    heads: int = 1
    """Neighbours that exchange heads: each has an equal part of what a rank of the ring would have."""

    @classmethod
    def of(cls, length: int, degree: int, *, may_split: bool, heads: int = 1) -> SlicePlacement:
        """Return the placement of a sequence, in two runs for each rank of the ring where these may be split and divide it."""
        ring = degree // heads
        return cls(length, degree, may_split and ring > 1 and length % (2 * ring) == 0, heads)

    @property
    def ring(self) -> SlicePlacement:
        """The placement among the groups of neighbours that exchange heads."""
        return SlicePlacement(self.length, self.degree // self.heads, self.is_head_tail)

    @property
    def size(self) -> int:
        """Tokens of a rank."""
        return self.length // self.degree

    def runs(self, rank: int) -> tuple[range, ...]:
        """Return the tokens of a rank, in increasing order."""
        if self.heads > 1:
            first = rank % self.heads * self.size
            return cut_runs(self.ring.runs(rank // self.heads), first, first + self.size)
        if not self.is_head_tail:
            return (range(rank * self.size, (rank + 1) * self.size),)
        half, last = self.size // 2, 2 * self.degree - 1 - rank
        return range(rank * half, (rank + 1) * half), range(last * half, (last + 1) * half)


def cut_runs(runs: tuple[range, ...], low: int, high: int) -> tuple[range, ...]:
    """Return the tokens at the positions from `low` up to `high` of what some runs hold."""
    parts, start = [], 0
    for run in runs:
        part = run[max(low - start, 0) : max(high - start, 0)]
        parts += [part] if part else []
        start += len(run)
    return tuple(parts)


class RingVisit(NamedTuple):
    """The part of the attention that a rank computes with one rank's keys and values, in positions of what each of the two holds."""

    queries: slice
    keys: slice
    is_causal: bool
    """Whether a query sees the keys up to its own position alone."""


def visit(placement: SlicePlacement, rank: int, source: int, *, is_causal: bool) -> RingVisit | None:
    """Return what `rank` computes with the keys of `source`; None where all of them are in the future of its queries."""
    size = placement.size
    everything = RingVisit(slice(0, size), slice(0, size), False)
    if not is_causal:
        return everything
    if rank == source:
        return everything._replace(is_causal=True)
    if not placement.is_head_tail:
        return everything if source < rank else None
    if source < rank:
        return everything._replace(keys=slice(0, size // 2))
    return everything._replace(queries=slice(size // 2, size))


def source_at(hop: int, rank: int, degree: int) -> int:
    """Return the rank whose keys and values a rank has after some hops."""
    return (rank - hop) % degree
