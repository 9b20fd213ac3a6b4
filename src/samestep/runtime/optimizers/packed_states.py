"""States of an optimizer that are held in fewer bits than it computes with: widened for an update, packed after it.

bf16   rounded at random, up or down with the probabilities that keep the mean: a second moment of which an update
       changes less than half a last place would stay for ever where it is, were it rounded to the nearest (Zamirai et
       al. 2020, arXiv:2010.06192). The random bits are a hash of (seed, step, weight, state, position in the whole weight), so
       every layout, and a resumed run, rounds alike.
8bit   codes of 256 numbers between -1 and 1, or 0 and 1 for states that are never negative, times a scale for each
       block: block-wise dynamic quantisation (Dettmers et al. 2022, arXiv:2110.02861; the numbers are those of its
       implementation, bitsandbytes). The scale is the element of a block with the largest magnitude, with its sign, which
       so keeps its value; each other element gets the nearest code. Blocks belong to the whole weight
       (`program/state_blocks.py`).

What is packed is a state of the shape of its weight. To widen and pack a state again changes no bit of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.optim import Optimizer

from samestep.job import Job
from samestep.program.program import Program
from samestep.runtime.weights.pieces import Piece
from samestep.runtime.weights.placement import Placements, WeightSlice

SCALE = ".scale"
"""Ends the name of the scales that belong to the codes of a state."""
_POSITIVE = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf", "step_size"})
"""States of torch's optimizers that are never negative."""
_SLICE = 2**22
"""Elements that are packed at a time."""
_ODD = -0x61C88647  # 2^32 / golden ratio, as a signed number


@dataclass(frozen=True, slots=True)
class StatePacking:
    """The form in which the states of a run's optimizer are held between two updates."""

    kind: str
    """`bf16` or `8bit`."""
    seed: int
    slice_of: Callable[[Piece], WeightSlice]
    """Returns the slice of the whole weight in which a piece lies."""
    blocks: Mapping[str, int]
    """Elements of a block of each weight's 8-bit states; 0, or no entry, for one whose states stay wide."""

    @classmethod
    def of(cls, job: Job, program: Program, placements: Placements) -> StatePacking | None:
        """Return how a job holds the states of its optimizer; None where they are as it computes with them."""
        kind = job.numerics.optimizer_states
        if kind == "float32":
            return None
        return cls(kind, job.train.seed, placements.slice_of, program.step.states.blocks)

    def widen(self, piece: Piece, state: dict[str, Any]) -> None:
        """Replace the packed tensors of a state by those that the optimizer computes with."""
        state.update(self.wide(piece, state))
        for key in [key for key in state if key.endswith(SCALE)]:
            del state[key]

    @contextmanager
    def widened(self, optimizer: Optimizer, pieces: Sequence[Piece], step: int) -> Iterator[None]:
        """Let an optimizer have the states of pieces as it computes with them inside, for its update of a step."""
        for piece in pieces:
            if (state := optimizer.state.get(piece.value)) is not None:
                self.widen(piece, state)
        try:
            yield
        finally:
            for piece in pieces:
                if (state := optimizer.state.get(piece.value)) is not None:
                    self.pack(piece, state, step)

    def wide(self, piece: Piece, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state with its tensors as the optimizer computes with them."""
        found = {key: value for key, value in state.items() if not key.endswith(SCALE)}
        for key, value in found.items():
            if not isinstance(value, Tensor):
                continue
            if value.dtype == torch.uint8 and key + SCALE in state:
                numbers = _numbers(key in _POSITIVE, value.device).index_select(0, value.flatten().int())
                scaled = numbers.view(len(state[key + SCALE]), -1).mul_(state[key + SCALE][:, None])
                found[key] = scaled.view(value.shape).to(piece.value.dtype)
            elif value.dtype == torch.bfloat16 and self._is_packed(piece, key, value):
                found[key] = value.to(piece.value.dtype)
        return found

    @torch.no_grad()
    def pack(self, piece: Piece, state: dict[str, Any], step: int) -> None:
        """Replace the tensors of a state by packed ones, in an update of a step counted from 0."""
        for key, value in list(state.items()):
            if not isinstance(value, Tensor) or not self._is_packed(piece, key, value):
                continue
            flat = value.detach().flatten()
            if self.kind == "bf16":
                state[key] = self._round_state(piece, key, flat, step).view(value.shape)
            elif block := self.blocks.get(piece.name, 0):
                codes, scales = quantise(flat.float(), block, is_positive=key in _POSITIVE)
                state[key], state[key + SCALE] = codes.view(value.shape), scales

    def _is_packed(self, piece: Piece, key: str, value: Tensor) -> bool:
        return key != "step" and value.is_floating_point() and value.shape == piece.value.shape and value.numel() > 0

    def _round_state(self, piece: Piece, key: str, flat: Tensor, step: int) -> Tensor:
        made = torch.empty(flat.shape, dtype=torch.bfloat16, device=flat.device)
        positions = _Positions(self.slice_of(piece), piece.start)
        salt = xxhash.xxh3_64_intdigest(f"{self.seed}/{step}/{piece.name}/{key}".encode())
        for start in range(0, flat.numel(), _SLICE):
            stop = min(start + _SLICE, flat.numel())
            noise = random_bits(positions.of(start, stop, flat.device), salt)
            made[start:stop] = round_stochastically(flat[start:stop].float(), noise)
        return made


@dataclass(frozen=True, slots=True)
class _Positions:
    """The positions in a flattened whole weight of the elements of a piece, modulo 2^32."""

    slice: WeightSlice
    start: int
    """First element of the piece in the flattened slice."""

    def of(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the positions of elements [start, stop) of the piece, int32."""
        number = torch.arange(self.start + start, self.start + stop, device=device)
        shape, dim, intervals = self.slice.shape, self.slice.dim, self.slice.intervals
        if shape and sum(last - first for first, last in intervals) != shape[dim]:
            inner = 1
            for size in shape[dim + 1 :]:
                inner *= size
            along = torch.cat([torch.arange(first, last, device=device) for first, last in intervals])
            row = torch.div(number, inner, rounding_mode="floor")
            outer = torch.div(row, len(along), rounding_mode="floor")
            number = (outer * shape[dim] + along[row % len(along)]) * inner + number % inner
        return number.to(torch.int32)


def random_bits(positions: Tensor, salt: int) -> Tensor:
    """Return 16 random bits, int32, for each position, which it overwrites: a hash of position and salt.

    Two rounds of the quadratic permutation x (2x + 1) of RC6 (Rivest et al. 1998), of which the upper bits are taken.
    """
    hashed = positions.mul_(_ODD).bitwise_xor_(_to_signed(salt & 0xFFFFFFFF))
    hashed.addcmul_(hashed, hashed, value=2)
    hashed.bitwise_xor_(hashed >> 15).add_(_to_signed(salt >> 32))
    hashed.addcmul_(hashed, hashed, value=2)
    return hashed.bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """Return float32 values in bfloat16, each rounded away from zero if its lower half is above 2^16 - 1 - `noise`."""
    bits = values.contiguous().view(torch.int32)
    raised = (bits + noise).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(values.isfinite(), raised, values).bfloat16()


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
    found = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade + is_positive)
        ends = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
        means = ((ends[:-1] + ends[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        found += means if is_positive else [*means, *(-mean for mean in means)]
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


def _to_signed(number: int) -> int:
    """Return 32 bits as a signed number."""
    return number - 2**32 if number >= 2**31 else number
