"""Dropout under tensor cuts and pipelines, which a layout places or rejects, and dropouts that are intercepted by their names.

Those draw the masks of the mode, and a forward that needs the mode gets it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import dropout as imported_dropout
from torch.utils.checkpoint import checkpoint

from samestep import Job, batches, parallelize
from samestep.errors import LayoutError
from samestep.randomness.mode import _TRACKERS, DropoutMode
from tests.laboratory import clipped, observe
from tests.models import MODELS, Attentive
from tests.parts import Words
from tests.pool import pool


class Folded(Attentive):
    """Neurons cut over tp, folded with tokens into one dimension: no run of it is a rank's."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            hidden = block.up(x).flatten(1)
            x = x + block.down(block.inner(hidden).unflatten(1, (x.shape[1], -1)))
        return self.head(x)


class Fused(Words):
    """Drops q, k and v before they are split."""

    tensor_plan = {"blocks.*.qkv": "qkv", "blocks.*.out": "row"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(FusedBlock, FusedBlock, width=16, entries=64)


class FusedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out, self.drop = nn.Linear(16, 48), nn.Linear(16, 16), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).mT for part in self.drop(self.qkv(x)).chunk(3, dim=-1))
        return x + self.out((q * k * v).mT.flatten(2))


MODELS |= {"folded": functools.partial(Folded, dropout=0.2), "fused": Fused}


@pytest.mark.parametrize(
    ("model", "layout", "text"),
    [
        ("fused", "tp=2", r"blocks.0.drop draws a dropout mask of shape .1, 12, 24. .* is not known"),
        ("folded", "tp=2", r"blocks.0.inner draws a dropout mask of shape .1, 288. .* or tp=1"),
    ],
)
def test_what_cannot_be_placed_is_refused_by_name(model: str, layout: str, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        pool(2).run(observe, model, layout, clipped())


# -- dropouts that are intercepted by their names -----------------------------------------------------

STEPS = 7
LATER = 13
"""The sample at which some models draw in another way: of step 5."""


class Samples(torch.utils.data.Dataset):
    """Samples (values, target, index)."""

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        values = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6) * (1 + index % 5)
        return values, torch.tensor(float(index % 3)), torch.tensor(index)


class Mixer(nn.Module):
    """An attention and an MLP with dropouts; `draw` is one more of them, given the values and the samples' indices."""

    def __init__(self, draw: Callable[[Tensor, Tensor], Tensor] | None = None, recomputes: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 1)
        self.drop = nn.Dropout(0.3)
        self.draw, self.recomputes = draw, recomputes
        self.kept = F.dropout

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return self.drop(x + F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)[:, 0])

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        y = checkpoint(self.mixed, x, use_reentrant=False) if self.recomputes else self.mixed(x)
        y = self.drop(F.scaled_dot_product_attention(y, y, y))
        if self.draw is not None:
            y = self.draw(y, index)
        return self.out(y).mean((1, 2))


class Kept(Mixer):
    """A model that calls a dropout by an attribute of its own."""

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return super().forward(self.kept(x, 0.3), index)


def by_import(x: Tensor, index: Tensor) -> Tensor:
    return imported_dropout(x, 0.4)


def other_dropout(x: Tensor, index: Tensor) -> Tensor:
    return F.alpha_dropout(x, 0.4, training=True)


def later(x: Tensor, index: Tensor) -> Tensor:
    """Draw by a function without a name here, of one rank's samples in one step alone; which other samples are there decides."""
    return F.alpha_dropout(x, 0.4, training=True) if bool((index == LATER).any()) else x


def loss(outputs: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    return (outputs - batch[1]).square().sum(), len(outputs)


BY_NAME: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "plain": (Mixer, False),
    "recomputed": (lambda: Mixer(recomputes=True), False),
    "imported": (lambda: Mixer(by_import), False),
    "kept": (Kept, True),
    "another": (lambda: Mixer(other_dropout), True),
    "later": (lambda: Mixer(later), True),
}


def losses(name: str, layout: str, precision: str) -> tuple[list[float], bool]:
    """Return the losses of some steps, and whether the model needs the mode."""
    job = Job(
        train={"global_batch": 4, "steps": STEPS, "watch_every": 0},
        numerics={"precision": precision},
        run={"device": "cpu", "allow": ["samples"] if name == "later" else []},
    )
    made = BY_NAME[name][0]
    run = parallelize(made, loss, lambda params: torch.optim.SGD(params, lr=0.01), layout=layout, job=job)
    found = [run.step(batch).loss for batch in batches(Samples(), job)]
    return found, _TRACKERS[run.model].names.needs_mode


def both(rank: int, world: int, name: str, layout: str, precision: str) -> tuple[list[float], list[float], bool]:
    """Return the losses with names, those under the mode alone, and whether the model needs the mode."""
    by_names, needs_mode = losses(name, layout, precision)
    with mock.patch.object(DropoutMode, "may_go_by_name", lambda self: self):
        by_mode, _ = losses(name, layout, precision)
    return by_names, by_mode, needs_mode


CASES = [
    *((name, "dp=1", "float32") for name in ("plain", "recomputed", "imported", "another")),
    ("plain", "dp=1 microbatch=1", "bf16"),
    *((name, "dp=2", "float64") for name in ("kept", "later")),
]


@pytest.mark.parametrize(("name", "layout", "precision"), CASES)
def test_names_draw_the_masks_of_the_mode(name: str, layout: str, precision: str) -> None:
    world = 2 if layout == "dp=2" else 1
    found = pool(world).run(both, name, layout, precision)
    for by_names, by_mode, _ in found:
        assert by_names == by_mode
    assert BY_NAME[name][1] in {
        needs_mode for *_, needs_mode in found
    }  # a rank that draws no such mask goes on by names
