"""The chunks in which a rank's pieces are updated, and the form in which they are held between two updates.

Pieces are held as the optimizer computes with them and updated all at once, unless masters are held in two halves
(`split_masters.py`) or states in fewer bits (`packed_states.py`). Then the wider values of one chunk exist at a time:

    for each chunk: join its masters, widen its states, lend its gradients, optimizer.step() over it alone, split, pack

Some pieces can be updated before others by the rules of torch's own optimizers alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.building.optimizer import members_of
from samestep.program.update_rules import update_chunks
from samestep.runtime.optimizers.packed_states import StatePacking
from samestep.runtime.optimizers.update_rule import is_torchs_own
from samestep.runtime.optimizers.used_weights import Unused
from samestep.runtime.weights.pieces import Piece
from samestep.runtime.weights.split_masters import SplitMasters

_AS_THEY_ARE = nullcontext()


@dataclass(frozen=True, slots=True)
class OneChunk:
    """All pieces, which are held as the optimizer computes with them."""

    pieces: list[Piece]

    def __iter__(self) -> Iterator[list[Piece]]:
        yield self.pieces

    def widened(
        self, optimizer: Optimizer, pieces: Sequence[Piece], unused: Unused, step: int
    ) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return _AS_THEY_ARE


@dataclass(frozen=True, slots=True)
class NarrowChunks:
    """Chunks of pieces, whose masters or states are held in less memory between two updates."""

    chunks: list[list[Piece]]
    packing: StatePacking | None

    def __iter__(self) -> Iterator[list[Piece]]:
        yield from self.chunks

    @contextmanager
    def widened(self, optimizer: Optimizer, pieces: Sequence[Piece], unused: Unused, step: int) -> Iterator[None]:
        """Let pieces have master values inside, and the optimizer states as it computes with them, for the update of a step.

        The weights that are `unused`, which the update leaves as they are, keep their states packed.
        """
        used = [piece for piece in pieces if piece.name not in unused]
        packed = self.packing.widened(optimizer, used, step) if self.packing is not None else nullcontext()
        with _joined_masters(pieces), packed:
            yield


Chunks = OneChunk | NarrowChunks


def chunks_of(
    pieces: list[Piece], optimizer: Optimizer | None, packing: StatePacking | None, *, splits_masters: bool
) -> Chunks:
    """Return the chunks in which an optimizer updates pieces, and split their masters if it `splits_masters`."""
    is_narrow = splits_masters or packing is not None or any(piece.split for piece in pieces)
    if optimizer is None or not is_narrow:
        return OneChunk(pieces)
    if not is_torchs_own(optimizer):  # over pieces that are split already, for another optimizer
        return NarrowChunks([pieces], packing)
    chunks = [[pieces[i] for i in indices] for indices in update_chunks([piece.value.numel() for piece in pieces])]
    for chunk in chunks if splits_masters else []:
        _split([piece for piece in chunk if _can_split(piece)])
    return NarrowChunks(chunks, packing)


def chunks_with(
    pieces: list[Piece],
    gradients: Sequence[Tensor],
    chunks: Chunks,
    optimizer: Optimizer,
    every: Sequence[Piece],
    unused: Unused,
) -> Sequence[tuple[list[Piece], Sequence[Tensor]]]:
    """Return pieces and their gradients in the chunks in which they are updated; they are some of `every` piece of the optimizer.

    Torch's fused SGD takes momenta of all weights or of none, so that weights that are used for the first time come by themselves.
    """
    sgd = [member for member in members_of(optimizer) if isinstance(member, torch.optim.SGD)]
    begins = bool(sgd) and any(group["fused"] for member in sgd for group in member.param_groups)
    if isinstance(chunks, OneChunk) and not begins:
        return [(pieces, gradients)]
    given = dict(zip(map(id, pieces), gradients, strict=True))
    together = _begun_first(chunks, optimizer, every, unused) if begins else chunks
    found = ([piece for piece in chunk if id(piece) in given] for chunk in together)
    return [(chunk, [given[id(piece)] for piece in chunk]) for chunk in found if chunk]


def _begun_first(
    chunks: Chunks, optimizer: Optimizer, pieces: Sequence[Piece], unused: Unused
) -> Sequence[list[Piece]]:
    begun = {
        id(piece)
        for piece in pieces
        if optimizer.state.get(piece.value, {}).get("momentum_buffer") is not None or piece.name in unused
    }
    parts = [
        [piece for piece in chunk if (id(piece) in begun) is has_begun]
        for chunk in chunks
        for has_begun in (True, False)
    ]
    return [part for part in parts if part]


def holding_only(optimizer: Optimizer, chunk: list[Piece] | None) -> AbstractContextManager[None]:
    """Return a context inside which an optimizer holds the pieces of a chunk alone; None lets it hold what it does."""
    return _AS_THEY_ARE if chunk is None else _holding(optimizer, chunk)


@contextmanager
def _holding(optimizer: Optimizer, chunk: list[Piece]) -> Iterator[None]:
    mine = {id(piece.value) for piece in chunk}
    held = [group["params"] for group in optimizer.param_groups]
    for group, params in zip(optimizer.param_groups, held, strict=True):
        group["params"] = [param for param in params if id(param) in mine]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, held, strict=True):
            group["params"] = params


def _can_split(piece: Piece) -> bool:
    target, value = piece.target, piece.value
    return (
        target is not None
        and piece.split is None
        and target.device == value.device
        and (target.dtype, value.dtype) == (torch.bfloat16, torch.float32)
    )


def _split(pieces: Sequence[Piece]) -> None:
    """Hold the masters of pieces in two halves from now on."""
    weights = [piece.target for piece in pieces if piece.target is not None]
    if not weights:
        return
    assert all(piece.value.shape == weight.shape for piece, weight in zip(pieces, weights, strict=True))
    masters = SplitMasters(weights, [piece.master() for piece in pieces])
    for index, piece in enumerate(pieces):
        piece.split = masters, index
        piece.value.data = masters.absent[index]


@contextmanager
def _joined_masters(pieces: Sequence[Piece]) -> Iterator[None]:
    """Let pieces have their master values inside, joined where they are held in two halves."""
    split = [(piece.value, *piece.split) for piece in pieces if piece.split is not None]
    groups = dict.fromkeys([masters for _, masters, _ in split])
    with ExitStack() as stack:
        windows = {masters: stack.enter_context(masters.joined()) for masters in groups}
        try:
            for value, masters, index in split:
                value.data = windows[masters][index]
            yield
        finally:
            for value, masters, index in split:
                value.data = masters.absent[index]
