"""The form in which a rank's pieces are held between two updates, states in few bits among them, and the chunks in which they are updated.

Pieces are held as the optimizer computes with them and updated all at once, unless masters are held in two halves
(`pieces.py`) or states are packed. Then the wider values of one chunk exist at a time:

    for each chunk: join its masters, widen its states, lend its gradients, optimizer.step() over it alone, split, pack

Some pieces can be updated before others by the rules of torch's own optimizers alone. A state of the shape of its weight is packed: it
is codes of 256 numbers between -1 and 1, or 0 and 1 for states that are never negative, times a scale for each block: block-wise
dynamic quantisation (Dettmers et al. 2022, arXiv:2110.02861; the numbers are those of its implementation, bitsandbytes). The scale is
the element of a block with the largest magnitude, with its sign, which so keeps its value; each other element gets the nearest code.
Blocks belong to the whole weight (`program/update_rules.py`).

To widen and pack a state again changes no bit of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.building.optimizer import members_of
from samestep.program.program import Program
from samestep.program.update_rules import update_chunks
from samestep.runtime.optimizers.update_rule import is_torchs_own
from samestep.runtime.optimizers.used_weights import Unused
from samestep.runtime.weights.pieces import Piece, SplitMasters

SCALE = ".scale"
"""Ends the name of the scales that belong to the codes of a state."""
_POSITIVE = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf", "step_size"})
"""States of torch's optimizers that are never negative."""


@dataclass(frozen=True, slots=True)
class StatePacking:
    """The form in which the states of a run's optimizer are held between two updates."""

    blocks: Mapping[str, int]
    """Elements of a block of each weight's 8-bit states; 0, or no entry, for one whose states stay wide."""

    @classmethod
    def of(cls, program: Program) -> StatePacking | None:
        """Return how a job holds the states of its optimizer; None where they are as it computes with them."""
        return cls(program.step.states.blocks) if program.step.states.are_packed else None

    def widen(self, piece: Piece, state: dict[str, Any]) -> None:
        """Replace the packed tensors of a state by those that the optimizer computes with."""
        state.update(self.wide(piece, state))
        for key in [key for key in state if key.endswith(SCALE)]:
            del state[key]

    @contextmanager
    def widened(self, optimizer: Optimizer, pieces: Sequence[Piece]) -> Iterator[None]:
        """Let an optimizer have the states of pieces as it computes with them inside."""
        for piece in pieces:
            if (state := optimizer.state.get(piece.value)) is not None:
                self.widen(piece, state)
        try:
            yield
        finally:
            for piece in pieces:
                if (state := optimizer.state.get(piece.value)) is not None:
                    self.pack(piece, state)

    def wide(self, piece: Piece, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state with its tensors as the optimizer computes with them."""
        wide_state = {key: value for key, value in state.items() if not key.endswith(SCALE)}
        for key, value in wide_state.items():
            if isinstance(value, Tensor) and value.dtype == torch.uint8 and key + SCALE in state:
                numbers = _numbers(key in _POSITIVE, value.device).index_select(0, value.flatten().int())
                scaled = numbers.view(len(state[key + SCALE]), -1).mul_(state[key + SCALE][:, None])
                wide_state[key] = scaled.view(value.shape).to(piece.value.dtype)
        return wide_state

    @torch.no_grad()
    def pack(self, piece: Piece, state: dict[str, Any]) -> None:
        """Replace the tensors of a state by packed ones."""
        block = self.blocks.get(piece.name, 0)
        for key, value in list(state.items()) if block else ():
            is_state = isinstance(value, Tensor) and value.is_floating_point() and value.shape == piece.value.shape
            if is_state and key != "step" and value.numel():
                codes, scales = quantise(value.detach().flatten().float(), block, is_positive=key in _POSITIVE)
                state[key], state[key + SCALE] = codes.view(value.shape), scales


def quantise(values: Tensor, block: int, *, is_positive: bool) -> tuple[Tensor, Tensor]:
    """Return codes (uint8 [n]) and scales (float32 [n / block]) of flat float32 values, whose number is a multiple of `block`.

    A block of zeros has the scale 0. A block with a number that is not finite has that as its scale, and no finite element.
    """
    rows = values.view(-1, block)
    largest = rows.amax(dim=1, keepdim=True)
    if is_positive:
        scales = largest
    else:
        least = rows.amin(dim=1, keepdim=True)
        scales = torch.where(largest < -least, least, largest)
    return _codes((rows / torch.where(scales == 0, 1.0, scales)).flatten(), is_positive), scales.flatten()


def _codes(values: Tensor, is_positive: bool) -> Tensor:
    """Return the codes (uint8) of the numbers nearest to float32 values between -1 and 1.

    A search for each value took ten times as long: its upper half, 16 bits, says which two codes it can have.
    """
    codes, edges = _codes_of_halves(is_positive, values.device)
    halves = (values.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
    return codes.index_select(0, halves).add_(values > edges.index_select(0, halves))


@functools.cache
def _codes_of_halves(is_positive: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return for each upper half of a float32 the code of the least number with it (uint8 [65536]), and the edge to the next code.

    Between two numbers with equal upper halves lies no more than one edge: the numbers that codes stand for are further apart.
    """
    numbers = _numbers(is_positive, torch.device("cpu"))
    edges = (numbers[1:] + numbers[:-1]) / 2
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).roll(
        2**15
    )  # as in memory: those of negative numbers behind
    rest = (halves < 0).int() * 0xFFFF
    least = (halves.bitwise_left_shift(16) | rest).view(torch.float32)
    codes = torch.bucketize(least, edges)
    above = torch.cat([edges, torch.tensor([torch.inf])])[codes]
    return codes.to(torch.uint8).to(device), above.to(device)


@functools.cache
def _numbers(is_positive: bool, device: torch.device) -> Tensor:
    """Return the numbers that the codes stand for, float32 [256], in rising order.

    Between powers of ten from 10^-7 to 1 lie twice as many numbers as between the two powers below them.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade + is_positive)
        ends = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
        means = ((ends[:-1] + ends[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        numbers += means if is_positive else [*means, *(-mean for mean in means)]
    return torch.tensor(sorted(numbers), dtype=torch.float32, device=device)


@dataclass(frozen=True, slots=True)
class UpdateChunks:
    """Chunks of pieces that are updated together; their masters or states may be held in less memory between two updates."""

    chunks: list[list[Piece]]
    packing: StatePacking | None

    @contextmanager
    def widened(self, optimizer: Optimizer, pieces: Sequence[Piece], unused: Unused) -> Iterator[None]:
        """Let pieces have master values inside, and the optimizer states as it computes with them, for the update of a step.

        The weights that are `unused`, which the update leaves as they are, keep their states packed.
        """
        used = [piece for piece in pieces if piece.name not in unused]
        packed = self.packing.widened(optimizer, used) if self.packing is not None else nullcontext()
        with _joined_masters(pieces), packed:
            yield

    @contextmanager
    def held(self, optimizer: Optimizer, chunk: list[Piece], unused: Unused) -> Iterator[None]:
        """Let an optimizer hold the pieces of a chunk alone inside, as it computes with them."""
        is_all = len(chunk) == sum(map(len, self.chunks))
        with self.widened(optimizer, chunk, unused), nullcontext() if is_all else _holding(optimizer, chunk):
            yield

    def of(
        self, pieces: Sequence[Piece], gradients: Sequence[Tensor], optimizer: Optimizer, unused: Unused
    ) -> Iterator[tuple[list[Piece], list[Tensor]]]:
        """Yield some of the pieces, and their gradients, in the chunks in which an optimizer updates them.

        Torch's fused SGD takes momenta of all weights or of none, so that weights that are used for the first time come by themselves.
        """
        by_piece = dict(zip(map(id, pieces), gradients, strict=True))
        sgd = [member for member in members_of(optimizer) if isinstance(member, torch.optim.SGD)]
        begins = any(group["fused"] for member in sgd for group in member.param_groups)
        for together in _begun_first(self.chunks, optimizer, unused) if begins else self.chunks:
            if chunk := [piece for piece in together if id(piece) in by_piece]:
                yield chunk, [by_piece[id(piece)] for piece in chunk]


def chunks_of(
    pieces: list[Piece], optimizer: Optimizer | None, packing: StatePacking | None, *, splits_masters: bool
) -> UpdateChunks | None:
    """Return the chunks in which an optimizer updates pieces, and split their masters if it `splits_masters`; None where all are updated at
    once, and held as it computes with them."""
    if optimizer is None:
        return None
    if not (splits_masters or packing is not None or any(piece.split for piece in pieces)):
        is_sgd = any(isinstance(member, torch.optim.SGD) for member in members_of(optimizer))
        return UpdateChunks([pieces], None) if is_sgd else None
    if not is_torchs_own(optimizer):  # over pieces that are split already, for another optimizer
        return UpdateChunks([pieces], packing)
    chunks = [[pieces[i] for i in indices] for indices in update_chunks([piece.value.numel() for piece in pieces])]
    for chunk in chunks if splits_masters else []:
        _split([piece for piece in chunk if _can_split(piece)])
    return UpdateChunks(chunks, packing)


def _begun_first(chunks: Sequence[list[Piece]], optimizer: Optimizer, unused: Unused) -> Iterator[list[Piece]]:
    for chunk in chunks:
        begun = [
            optimizer.state.get(piece.value, {}).get("momentum_buffer") is not None or piece.name in unused
            for piece in chunk
        ]
        yield [piece for piece, has_begun in zip(chunk, begun, strict=True) if has_begun]
        yield [piece for piece, has_begun in zip(chunk, begun, strict=True) if not has_begun]


@contextmanager
def _holding(optimizer: Optimizer, chunk: list[Piece]) -> Iterator[None]:
    ids = {id(piece.value) for piece in chunk}
    params_of_groups = [group["params"] for group in optimizer.param_groups]
    for group, params in zip(optimizer.param_groups, params_of_groups, strict=True):
        group["params"] = [param for param in params if id(param) in ids]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, params_of_groups, strict=True):
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
