"""Checkpoints of the model's own code: what their repeated forwards send is what the program lists, in every layout.

A checkpoint repeats its code as far as something in it is kept, in front of the first backward that asks for it. What ranks send behind
that is not sent again, and its backward comes before; and a checkpoint within another one is repeated with the outer one, and by itself.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from samestep.enumeration.candidates import recomputations
from samestep.layout import Layout
from tests.laboratory import clipped, prove, source_of
from tests.models import MODELS, Attention, DealingBlock, ExpertDispatch, Parted, PartedBlock
from tests.parity.moved_models import Mixing, Recurrence, RecurrentLayers, decayed_sums
from tests.proof.odd_code import checkpointing_gpt2

_products = functools.partial(
    create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
)
_again = functools.partial(checkpoint, use_reentrant=False)


class OwnBlock(PartedBlock):
    """A block whose own code checkpoints some of it."""

    def __init__(self, what: str) -> None:
        super().__init__(16, 4)
        self.what = what
        self.attention = OwnAttention(16, 4, is_core="core" in what)

    def forward(self, x: Tensor) -> Tensor:
        what = self.what.split(", ")
        if "whole" in what:  # and something is kept behind it: else the layout's recompute would stand for it
            return torch.tanh(_again(self.computed, x))
        return self.computed(x)

    def computed(self, x: Tensor) -> Tensor:
        what = self.what.split(", ")
        kept = {"context_fn": _products} if "selective" in what else {}
        x = x + (_again(self.attended, x, **kept) if "attention" in what else self.attended(x))
        if "mlp" in what:
            return x + _again(self.fed, x, **kept)
        if "reentrant" in what:
            return x + checkpoint(self.fed, x, use_reentrant=True)
        if "norm" in what:  # which sends nothing
            return x + self.mlp(_again(self.second, x))
        if "bent" in what:  # something is kept behind the last sum
            return x + _again(lambda x: torch.tanh(self.fed(x)), x)
        return x + self.fed(x)

    def attended(self, x: Tensor) -> Tensor:
        return self.attention(self.first(x)) * self.gain

    def fed(self, x: Tensor) -> Tensor:
        return self.mlp(self.second(x))


class OwnAttention(Attention):
    """An attention of which the kernel alone is checkpointed."""

    def __init__(self, width: int, heads: int, is_core: bool) -> None:
        super().__init__(width, heads)
        self.is_core = is_core

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (self.q(x), self.k(x), self.v(x))
        )
        attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        q = self.head_norm(q)
        mixed = _again(attend, q, k, v) if self.is_core else attend(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Own(Parted):
    """A model of which each block checkpoints something else."""

    def __init__(self, what: str) -> None:
        super().__init__(blocks=0)
        self.what = what
        self.blocks = nn.ModuleList(OwnBlock(of_block) for of_block in what.split(" | "))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        if "head" in self.what:
            return _again(lambda x: self.head(self.norm(x)), x)
        return self.head(self.norm(x))


KINDS = {
    "mlp | attention | core | bent": "repeat",
    "whole, mlp | whole, attention | whole, attention, mlp | whole, core, bent": "repeat",
    "attention, mlp | selective, attention, mlp": "plain",
    "reentrant | norm | whole | head": "repeat",
}
"""What the blocks checkpoint, and what becomes of it; with the head, the model checkpoints its end."""


class OwnMixing(Mixing):
    """Convolutions and recurrences, checkpointed by the mixer, or within it; each block has a kind of its own."""

    def __init__(self, what: str) -> None:
        super().__init__({"scan": OwnScan, "layers": OwnLayers}.get(what, OwnRecurrence))
        if what == "layers":  # of which one block has four recurrences, whose trace takes seconds
            self.blocks = self.blocks[:1]
        for block, of_block in zip(self.blocks, [*what.split(" | "), what], strict=False):
            block.mixer.what = of_block


class OwnRecurrence(Recurrence):
    what = ""

    def forward(self, x: Tensor) -> Tensor:
        if " " in self.what and "reentrant" not in self.what:
            found = super().forward(x) if "plain" in self.what else _again(super().forward, x)
            return self.before(x) + found.detach() if "detached" in self.what else self.before(x)
        if self.what == "reentrant mixer":
            return checkpoint(super().forward, x, use_reentrant=True)
        return _again(super().forward, x)


class OwnScan(Recurrence):
    """The recurrence alone is checkpointed, behind a convolution that is not."""

    def forward(self, x: Tensor) -> Tensor:
        inside = F.silu(self.conv(self.before(x).mT)[..., : x.shape[1]]).mT
        return self.behind(_again(self.scanned, inside))

    def scanned(self, x: Tensor) -> Tensor:
        return decayed_sums(x, self.decay(x).sigmoid())[0]


class OwnLayers(RecurrentLayers):
    def forward(self, x: Tensor) -> Tensor:
        return _again(super().forward, x)


MIXINGS = ("mixer | reentrant mixer", "scan", "layers")


class OwnDealing(ExpertDispatch):
    """Experts under a checkpoint of their block's own: with the norm in front of them in the first block, without it in the second."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.__class__ = OwnDealingBlock
        self.blocks[0].is_whole = True


class OwnDealingBlock(DealingBlock):
    is_whole = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_whole:
            return _again(super().forward, x)
        rows = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        return x + _again(self.experts, rows, chosen, weights).view_as(x)


class Idle(Parted):
    """A decoder whose blocks each compute something that the loss does not depend on, or not by way of it."""

    def __init__(self, what: str) -> None:
        super().__init__(blocks=0)
        self.blocks = nn.ModuleList(IdleBlock(of_block) for of_block in what.split(" | "))


class IdleBlock(PartedBlock):
    def __init__(self, what: str) -> None:
        super().__init__(16, 4)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        def attended(x: Tensor) -> Tensor:
            return self.attention(self.first(x)) * self.gain

        found = _again(attended, x) if "checkpoint" in self.what else attended(x)
        if "detached" in self.what:
            x = x + found.detach()
        return x + self.mlp(self.second(x))


IDLE = ("detached | unused", "detached checkpoint | unused checkpoint")
IDLE_MIXINGS = ("mixer detached | plain unused", "mixer unused | plain detached")
MODELS |= {f"own checkpoint: {what}": functools.partial(Idle, what) for what in IDLE}
MODELS |= {f"own checkpoint: {what}": functools.partial(OwnMixing, what) for what in (*MIXINGS, *IDLE_MIXINGS)}
MODELS |= {f"own checkpoint: {what}": functools.partial(Own, what) for what in KINDS}
MODELS |= {"own checkpoint: gpt2 of transformers": checkpointing_gpt2, "own checkpoint: experts": OwnDealing}
LAYOUTS = (
    "tp=2",
    "cp=2",
    "tp=2 sequence_parallel",
    "cp=2 exchange=ring",
    "tp=2 recompute=full",
    "cp=2 recompute=selective",
    "cp=2 recompute=full",
    "tp=2 sequence_parallel recompute=full",
    "pp=2 cp=2 microbatch=2",
    "pp=2 tp=2 microbatch=2 schedule=zero-bubble",
    "tp=2 cp=2 zero=3 sequence_parallel",
)
OF_EXPERTS = ("dp=2 ep=2 zero=1", "dp=2 ep=2 zero=3 recompute=full", "dp=2 ep=2 microbatch=2")
OF_STATES = ("cp=2", "cp=2 recompute=full", "tp=2 cp=2 microbatch=2", "cp=3 recompute=selective")
OF_IDLE = ("tp=2", "cp=2", "cp=2 exchange=ring", "tp=2 sequence_parallel", "cp=2 recompute=full")
_OF_FIRST, _OF_WHOLE, _PLAIN, _OF_REENTRY = KINDS
DAILY = {
    (_OF_FIRST, "tp=2 recompute=full"),
    (_OF_WHOLE, "tp=2 sequence_parallel"),
    (_OF_WHOLE, "cp=2 recompute=full"),
    (_PLAIN, "tp=2 sequence_parallel recompute=full"),
    (_OF_REENTRY, "tp=2 recompute=full"),
}
"""What runs beside the rows that hold each kind and each setting of a layout."""
PARTS = [
    *((model, layout) for model in MIXINGS for layout in OF_STATES),
    *(("experts", layout) for layout in OF_EXPERTS),
    *((model, layout) for model in IDLE for layout in OF_IDLE),
    *((model, layout) for model in IDLE_MIXINGS for layout in OF_STATES[:2]),
]


def _named(rows: Iterable[tuple[str, str]]) -> list[Any]:
    """Return rows that name models, which are traced before ranks are forked."""
    daily = pytest.mark.every_row
    return [
        pytest.param(
            f"own checkpoint: {model}", layout, id=f"{model}-{layout}", marks=daily if (model, layout) in DAILY else ()
        )
        for model, layout in rows
    ]


@pytest.mark.parametrize(("model", "layout"), _named(itertools.product(KINDS, LAYOUTS)))
def test_what_own_checkpoints_send_again_is_listed(model: str, layout: str) -> None:
    prove(layout, model)


@pytest.mark.parametrize(("model", "layout"), _named(PARTS))
def test_states_and_rows_of_experts_that_are_sent_again_are_listed_and_what_the_loss_does_not_depend_on_is_not(
    model: str, layout: str
) -> None:
    prove(layout, model)


@pytest.mark.parametrize("what", [*KINDS, "gpt2 of transformers"])
def test_blocks_whose_own_checkpoints_hold_all_that_they_keep_are_taken_as_recomputed(what: str) -> None:
    prepared = source_of(f"own checkpoint: {what}", Layout("tp=2"), clipped()).prepared
    taken = KINDS.get(what, "plain")
    assert prepared is not None
    assert prepared.spec.checkpoints == taken
    assert ("none" in recomputations(prepared.spec)) == (taken == "repeat")  # no plan offers what would not run
