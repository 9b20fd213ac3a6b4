"""Checkpoints of the model's own code: what their repeated forwards send is what the program lists, in every layout.

A checkpoint repeats its code as far as something in it is kept, in front of the first backward that asks for it. What ranks send behind
that is not sent again, and its backward comes before; and a checkpoint within another one is repeated with the outer one, and by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from samestep.building.loss import loss_of
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.enumeration.candidates import recomputations
from samestep.examination.examine import Source, examine
from samestep.layout import Layout
from tests.laboratory import clipped, prove
from tests.models import MODELS, Attention, DealingBlock, ExpertDispatch, Parted, PartedBlock, Tokens
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
    def __init__(self, what: str) -> None:
        super().__init__(blocks=2)
        self.what = what
        self.blocks = nn.ModuleList(OwnBlock(what) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        if "head" in self.what:
            return _again(lambda x: self.head(self.norm(x)), x)
        return self.head(self.norm(x))


KINDS = (
    "mlp",
    "attention",
    "attention, mlp",
    "whole",
    "whole, mlp",
    "whole, attention",
    "whole, attention, mlp",
    "whole, core, bent",
    "reentrant",
    "norm",
    "bent",
    "core",
    "selective, attention, mlp",
    "head",
)
"""What blocks checkpoint, and the model."""


class OwnMixing(Mixing):
    """A convolution and a recurrence in two blocks, checkpointed by the mixer, by the block, or within the mixer."""

    def __init__(self, what: str) -> None:
        super().__init__({"scan": OwnScan, "layers": OwnLayers}.get(what, OwnRecurrence))
        if what == "layers":  # of which one block has four recurrences, whose trace takes seconds
            self.blocks = self.blocks[:1]
        for block in self.blocks:
            block.mixer.what = what


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


MIXINGS = ("mixer", "reentrant mixer", "scan", "layers")
MODELS |= {f"own checkpoint: {what}": functools.partial(OwnMixing, what) for what in MIXINGS}
MODELS |= {f"own checkpoint: {what}": functools.partial(Own, what) for what in KINDS}
MODELS["own checkpoint: gpt2 of transformers"] = checkpointing_gpt2


def _named(kinds: Iterable[object], prefix: str = "own checkpoint") -> list[Any]:
    """Return rows that name models, which are traced before ranks are forked; their ids are the kinds."""
    return [pytest.param(f"{prefix}: {kind}", id=str(kind)) for kind in kinds]


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


TAKEN = {
    "attention": "repeat",
    "attention, mlp": "plain",
    "core": "repeat",
    "head": "repeat",
    "mlp": "repeat",
    "norm": "repeat",
    "selective, attention, mlp": "plain",
    "whole": "repeat",
    "gpt2 of transformers": "plain",
}
"""What blocks checkpoint, and what becomes of it."""


@pytest.mark.parametrize("what", TAKEN)
def test_blocks_whose_own_checkpoints_hold_all_that_they_keep_are_taken_as_recomputed(what: str) -> None:
    source = Source(MODELS[f"own checkpoint: {what}"], loss_of(clipped()), optimizer_of(clipped()))
    traced = examine(source, clipped(), next(batches(Tokens(), clipped())).samples([0]), Layout())
    spec = traced.analysis.spec
    assert spec.checkpoints == TAKEN[what]
    assert ("none" in recomputations(spec)) == (TAKEN[what] == "repeat")  # no plan offers what would not run


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", _named(KINDS))
def test_what_own_checkpoints_send_again_is_listed(layout: str, model: str) -> None:
    prove(layout, model)


@pytest.mark.parametrize(
    "layout", ["cp=2", "cp=2 recompute=full", "tp=2 cp=2 microbatch=2", "cp=3 recompute=selective"]
)
@pytest.mark.parametrize("model", _named(MIXINGS))
def test_states_that_own_checkpoints_send_again_are_listed(layout: str, model: str) -> None:
    prove(layout, model)


class OwnDealing(ExpertDispatch):
    """Experts, with or without the norm of their block in front of them, under a checkpoint of the block's own."""

    def __init__(self, is_whole: bool) -> None:
        super().__init__()
        for block in self.blocks:
            block.__class__ = OwnDealingBlock
            block.is_whole = is_whole


class OwnDealingBlock(DealingBlock):
    is_whole = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_whole:
            return _again(super().forward, x)
        rows = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        return x + _again(self.experts, rows, chosen, weights).view_as(x)


MODELS |= {
    f"own checkpoint of experts: {is_whole}": functools.partial(OwnDealing, is_whole) for is_whole in (True, False)
}


@pytest.mark.parametrize("layout", ["dp=2 ep=2 zero=1", "dp=2 ep=2 zero=3 recompute=full", "dp=2 ep=2 microbatch=2"])
@pytest.mark.parametrize("model", _named((True, False), "own checkpoint of experts"))
def test_rows_that_own_checkpoints_deal_again_are_listed(layout: str, model: str) -> None:
    prove(layout, model)


class Idle(Parted):
    """A decoder whose blocks compute something that the loss does not depend on, or not by way of it."""

    def __init__(self, what: str) -> None:
        super().__init__(blocks=2)
        self.blocks = nn.ModuleList(IdleBlock(what) for _ in range(2))


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


IDLE = ("detached", "unused", "detached checkpoint", "unused checkpoint")
MODELS |= {f"own checkpoint: {what}": functools.partial(Idle, what) for what in IDLE}
IDLE_MIXINGS = ("mixer detached", "mixer unused", "plain detached", "plain unused")
MODELS |= {f"own checkpoint: {what}": functools.partial(OwnMixing, what) for what in IDLE_MIXINGS}


@pytest.mark.parametrize(
    "layout", ["tp=2", "cp=2", "cp=2 exchange=ring", "tp=2 sequence_parallel", "cp=2 recompute=full"]
)
@pytest.mark.parametrize("model", _named(IDLE))
def test_no_gradient_is_listed_of_what_the_loss_does_not_depend_on(layout: str, model: str) -> None:
    prove(layout, model)


@pytest.mark.parametrize("layout", ["cp=2", "cp=2 recompute=full"])
@pytest.mark.parametrize("model", _named(IDLE_MIXINGS))
def test_no_gradient_is_listed_of_states_that_the_loss_does_not_depend_on(layout: str, model: str) -> None:
    prove(layout, model)
