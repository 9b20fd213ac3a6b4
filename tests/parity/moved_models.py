"""Blocks that mix tokens by what lies at a fixed distance, in the spellings of public code."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parts import Words

WIDTH, ENTRIES = 16, 64
Make = Callable[[int], nn.Module]


class Mixing(Words):
    """A decoder with a mixer of tokens in each block."""

    def __init__(self, make: Make, blocks: int = 2) -> None:
        super().__init__(*[functools.partial(MixingBlock, make)] * blocks, width=WIDTH, entries=ENTRIES)


class MixingBlock(nn.Module):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), make(WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x))
        return x + self.ff(x)


class BareBlock(nn.Module):
    """A block that shifts tokens itself, and in which nothing follows a recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.decay = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm(x).roll(1, 1)
        return x + decayed_sums(self.linear(inside), self.decay(inside).sigmoid())[0]


class Bare(Mixing):
    def __init__(self) -> None:
        super().__init__(lambda width: nn.Linear(width, width))
        self.blocks = nn.ModuleList(BareBlock() for _ in range(2))


class ShortConvolution(nn.Module):
    """Gates around a convolution for each channel, as in LFM2: zeros on both sides, of which the last results are cut off."""

    def __init__(self, width: int, kernel: int = 3, dilation: int = 1, groups: int = WIDTH) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(width, 3 * width), nn.Linear(width, width)
        reach = dilation * (kernel - 1)
        self.conv = nn.Conv1d(width, width, kernel, groups=groups, padding=reach, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        first, gate, x = self.before(x).mT.chunk(3, 1)
        x = F.silu(self.conv(first * x))[..., : x.shape[-1]]
        return self.behind((gate * x).mT)


class PaddedConvolution(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 4, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.silu(F.pad(x.mT, (3, 0)))).mT


class SameConvolution(nn.Module):
    def __init__(self, width: int, mode: str = "zeros") -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 5, padding="same", padding_mode=mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT).mT


def decayed_sums(
    x: Tensor, decay: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return h_t = decay_t h_{t-1} + x_t of each token, and the last."""
    state, found = torch.zeros_like(x[:, 0]) if initial_state is None else initial_state, []
    for at in range(x.shape[1]):
        state = decay[:, at] * state + x[:, at]
        found.append(state)
    return torch.stack(found, 1), state if output_final_state else None


def decayed_from_zero(
    x: Tensor, decay: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The same, but it begins at zero whatever it is given."""
    found = [x[:, 0]]
    for at in range(1, x.shape[1]):
        found.append(decay[:, at] * found[-1] + x[:, at])
    return torch.stack(found, 1), found[-1] if output_final_state else None


class Recurrence(nn.Module):
    """A convolution and a recurrence between linear layers, as in Mamba."""

    def __init__(self, width: int, is_true: bool = True) -> None:
        super().__init__()
        self.before, self.decay, self.behind = (nn.Linear(width, width) for _ in range(3))
        self.conv = nn.Conv1d(width, width, 3, padding=2, groups=width)
        self.is_true = is_true

    def forward(self, x: Tensor) -> Tensor:
        inside = F.silu(self.conv(self.before(x).mT)[..., : x.shape[1]]).mT
        if self.is_true:
            sums, _ = decayed_sums(inside, self.decay(inside).sigmoid())
        else:
            sums, _ = decayed_from_zero(inside, self.decay(inside).sigmoid())
        return self.behind(sums)


def convolved_sums(
    x: Tensor, conv: nn.Conv1d, decay: nn.Linear, initial_state: Tensor | None = None, output_final_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the sums behind a convolution: no recurrence by itself, since tokens before it reach its first tokens too."""
    inside = F.silu(conv(x.mT)[..., : x.shape[1]]).mT
    return decayed_sums(inside, decay(inside).sigmoid(), initial_state, output_final_state)


class FusedRecurrence(Recurrence):
    """One function for all in training, as Mamba 2 has it, and its parts in an evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        return self.behind(convolved_sums(self.before(x), self.conv, self.decay)[0])


class RecurrentLayers(nn.Module):
    """Torch's recurrent layers: tokens in the first dimension and in the second, and a state that is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)
        self.lstm = nn.LSTM(width, 24, 2, proj_size=width)
        self.rnn = nn.RNN(width, width, nonlinearity="relu", bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gru(x)[0]
        x = self.lstm(x.transpose(0, 1))[0].transpose(0, 1)
        return self.rnn(x, x.new_full((1, len(x), x.shape[-1]), 0.5))[0]


class Taps(nn.Module):
    """A convolution that is written out, as a sum over shifted tokens or over windows of them."""

    def __init__(self, width: int, by_windows: bool) -> None:
        super().__init__()
        self.taps, self.by_windows = nn.Parameter(torch.randn(4, width)), by_windows

    def forward(self, x: Tensor) -> Tensor:
        padded, length = F.pad(x, (0, 0, 3, 0)), x.shape[1]
        if self.by_windows:
            return torch.einsum("btdk,kd->btd", padded.unfold(1, 4, 1), self.taps)
        found = [tap * padded[:, at : at + length] for at, tap in enumerate(self.taps)]
        return found[0] + found[1] + found[2] + found[3]


def _written(x: Tensor) -> Tensor:
    shifted = torch.zeros_like(x)
    shifted[:, 1:] = x[:, :-1]
    return shifted


def _rolled(x: Tensor) -> Tensor:
    shifted = x.roll(1, 1)
    shifted[:, 0] = 0
    return shifted


class Shift(nn.Module):
    """The shift of tokens in RWKV."""

    def __init__(self, width: int, shift: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix, self.linear = nn.Parameter(torch.rand(width)), nn.Linear(width, width)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.mix + self.shift(x) * (1 - self.mix))


def behind_a_shifted_token(x: Tensor) -> Tensor:
    """Shift tokens behind one that another shift has given: on one rank alone something reads that shift."""
    return torch.cat((F.pad(x, (0, 0, 1, -1))[:, 1:2], x[:, :-1]), 1)


class LearntFirst(Shift):
    """A shift with a token of its own in front."""

    def __init__(self, width: int, rows: int = 1) -> None:
        super().__init__(width, self.behind_first)
        self.first = nn.Parameter(torch.randn(1, rows, width))

    def behind_first(self, x: Tensor) -> Tensor:
        return torch.cat((self.first.expand(len(x), -1, -1), x[:, : -self.first.shape[1]]), 1)


def _shifts(shift: Callable[[Tensor], Tensor]) -> Make:
    return functools.partial(Shift, shift=shift)


MIXERS: dict[str, tuple[Make, int, int]] = {
    "short convolution": (ShortConvolution, 2, 0),
    "dilated, of all channels": (functools.partial(ShortConvolution, dilation=2, groups=1), 4, 0),
    "padded": (PaddedConvolution, 3, 0),
    "same": (SameConvolution, 2, 2),
    "taps": (functools.partial(Taps, by_windows=False), 3, 0),
    "windows": (functools.partial(Taps, by_windows=True), 3, 0),
    "shift by cat": (_shifts(lambda x: torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)), 1, 0),
    "shift by pad": (_shifts(lambda x: F.pad(x, (0, 0, 1, -1))), 1, 0),
    "shift by pad of a part": (_shifts(lambda x: F.pad(x[:, :-1], (0, 0, 1, 0))), 1, 0),
    "around": (functools.partial(SameConvolution, mode="circular"), 2, 2),
    "shift in place": (_shifts(_written), 1, 0),
    "shift by roll": (_shifts(_rolled), 1, 0),
    "shift back": (_shifts(lambda x: torch.cat((x[:, 1:], x[:, -1:]), 1)), 0, 1),
    "learnt first token": (LearntFirst, 1, 0),
    "more than half of the tokens learnt": (functools.partial(LearntFirst, rows=4), 4, 0),
}
"""Mixers, with the number of tokens that they need of each neighbour."""
