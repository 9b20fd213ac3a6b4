"""Models whose later layers read more than the tensor before them, as people write them, and some that hide what they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import VOCABULARY
from tests.parts import Words

WIDTH = 8


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Language(Words):
    """Embedding, four blocks, head; the plainest forward is that of this class."""

    block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__(*[self.block] * 4, width=WIDTH, entries=VOCABULARY)


class FixedPoint(Language):
    """Blocks that run without gradients until they hardly change anything, and then once with them (DEQ)."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x0 = self.embed(input_ids)
        with torch.no_grad():
            x = torch.zeros_like(x0)
            for block in (*self.blocks, *self.blocks):
                x = torch.tanh(block(x + x0))
        for block in self.blocks:
            x = torch.tanh(block(x + x0))
        return self.head(x)


# -- more than one tensor --------------------------------------------------------------------------


class MixtureOfSoftmaxes(Language):
    """Code behind the blocks that looks at the shape of what a layer there makes (Yang et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.prior, self.latent = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        parts = self.head(torch.tanh(self.latent(x)).view(*x.shape[:2], 3, WIDTH)).softmax(-1)
        return torch.log((self.prior(x).softmax(-1).unsqueeze(-1) * parts).sum(2) + 1e-8)


class Skips(Language):
    def forward(self, input_ids: Tensor) -> Tensor:
        x, skips = self.embed(input_ids), []
        for block in self.blocks[:2]:
            skips.append(x)
            x = block(x)
        for block in self.blocks[2:]:
            x = block(x * torch.sigmoid(skips.pop()))
        return self.head(x)


class AllStates(Language):
    """Every hidden state has a part in the output, and is an output too."""

    def forward(self, input_ids: Tensor) -> dict[str, Any]:
        states = [self.embed(input_ids)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return {"logits": self.head(torch.stack(states).mean(0)), "states": states}


class _Modulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.scale = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.scale(F.silu(condition)).chunk(2, dim=-1)
        return x + torch.tanh(self.mix(x * (1 + scale[:, None]) + shift[:, None]))


class Conditioned(Language):
    """A condition computed before the blocks, by an embedding, a linear layer and a norm (DiT, FiLM)."""

    block = _Modulated

    def __init__(self) -> None:
        super().__init__()
        self.label, self.project, self.norm = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        condition = self.norm(self.project(self.label(input_ids[:, 0])))
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, condition=condition)
        return self.head(x)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.both = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.both(self.embed(input_ids.flip(1)), self.embed(input_ids)))


class TwoEmbeddings(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        source, target = self.source(input_ids.flip(1)), self.embed(input_ids)
        return self.head(self.both(source, target))


class _Positions(nn.Embedding):
    def forward(self, shape: tuple[int, int]) -> Tensor:  # type: ignore[override]
        return super().forward(torch.arange(shape[1], device=self.weight.device))


class PositionsByShape(Language):
    """An embedding that is given a shape, no tensor (Bart, Blenderbot)."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = _Positions(64, WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.positions(tuple(input_ids.shape))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# -- other results than one tensor -----------------------------------------------------------------


class _Biased(nn.Module):
    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(12, 1) if is_first else None

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            assert self.table is not None
            positions = torch.arange(x.shape[1], device=x.device)
            bias = self.table((positions[:, None] - positions).clamp(0, 11))[..., 0]
        return x + self.mix(bias.tril().softmax(-1) @ x), bias


class SharedBias(nn.Module):
    """The first block makes a bias of pairs of positions for all blocks, as T5 does; it has no dimension of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(_Biased(index == 0) for index in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x, bias = self.embed(input_ids), None
        for block in self.blocks:
            x, bias = block(x, bias)
        return self.head(x)


# -- weights that the model itself reads -----------------------------------------------------------


class Gains(Language):
    """Weights of the model itself, read on the first stage, on the last, and on both (modded-nanogpt)."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.1 * torch.randn(12, WIDTH))
        self.gains = nn.ParameterList(nn.Parameter(torch.full((WIDTH,), 0.5)) for _ in range(2))
        self.mix = nn.Parameter(torch.tensor([0.3, 0.7]))
        self.scale = nn.Parameter(torch.tensor([0.2]))
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = x0 = self.embed(input_ids) + self.positions[: input_ids.shape[1]]
        skips = []
        for block in self.blocks[:2]:
            skips.append(x)
            x = block(self.mix[0] * x + self.mix[1] * x0)
        for gain, block in zip(self.gains, self.blocks[2:], strict=True):
            x = block(x + gain * skips.pop() + self.mix[1] * x0)
        return self.head(x) * self.scale.exp()


class SoftTokens(Language):
    """The head's weight is read in front of the blocks, and the embedding's is the head of a second output."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        x = x + 0.1 * (x @ self.head.weight.T).softmax(-1) @ self.head.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x) + nn.functional.linear(x, self.embed.weight)


class _Valued(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.share = nn.Parameter(torch.tensor([0.6, 0.4]))

    def forward(self, x: Tensor, first: Tensor | None, x0: Tensor) -> tuple[Tensor, Tensor]:
        value = self.value(x)
        first = value if first is None else first
        return x + self.mix(torch.tanh(self.share[0] * value + self.share[1] * first)) + 0.1 * x0, first


class FirstValues(Language):
    """Blocks are given the embeddings and the values of the first block; weights of the model scale what they return."""

    block = _Valued

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.gains = nn.Parameter(0.1 * torch.randn(12, WIDTH)), nn.Parameter(torch.ones(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = x0 = self.embed(input_ids) + self.positions
        first = None
        for block, gain in zip(self.blocks, self.gains, strict=True):
            x, first = block(x * gain, first, x0)
        return self.head(x)


class _Alone(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.model[0].gain  # type: ignore[operator, index]


class BehindBack(Language):
    """Blocks reach a weight of the model through an attribute."""

    block = _Alone

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH))
        for block in self.blocks:
            block.__dict__["model"] = [self]


class CalledTwice(Language):
    """Every block is called twice in a row, and the blocks stand in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({f"layer {index}": Block() for index in range(4)})

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for name, block in self.blocks.items():
            x = block(block(x)) * (0.5 if name.endswith("2") else 1.0)
        return self.head(x)


class _Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.after = nn.MultiheadAttention(WIDTH, 2, batch_first=True), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.attention(x, x, x, need_weights=False)[0])


class Vision(nn.Module):
    """Patches, a class token, positions, blocks in an nn.Sequential, a scale of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 10, WIDTH))
        self.blocks = nn.Sequential(*(_Seeing() for _ in range(4)))
        self.head, self.scale = nn.Linear(WIDTH, 4), nn.Parameter(torch.ones(1))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.blocks(x)[:, 0]) * self.scale.exp()


# -- widths, frozen starts, dtypes -----------------------------------------------------------------


class _Stream(nn.Module):
    dtype = torch.bfloat16

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.mix.weight.dtype)
        return (y + torch.tanh(self.mix(y))).to(self.dtype)


class LowStream(Language):
    """A residual stream in bf16, whatever the job's precision is."""

    block = _Stream

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.to(self.head.weight.dtype))


class _Raising(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(x)).float()


class HighStream(Language):
    """A residual stream in float32, also in a job in bf16."""

    block = _Raising


# -- forms of code ---------------------------------------------------------------------------------


class InPlace(Language):
    """The model's own code writes into what blocks return, and into a tensor of its own."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        last = torch.zeros(4, *x.shape, dtype=x.dtype, device=x.device)
        for index, block in enumerate(self.blocks):
            x = block(x) * 1.0
            x += 0.1 * index
            x[:, 0] = 0.0
            last[index] = x
            x.mul_(1.1)
        return self.head(x + last.sum(0))


class Asking(Language):
    """Code that asks modules for their class, their device and their dtype, and uses the shape of a result."""

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=self.embed.weight.device)
        x = x0 = self.embed(input_ids)
        for block in self.blocks:
            assert isinstance(block, Block)
            ramp = positions.to(block.mix.weight.dtype)[:, None] / x.shape[1]
            x = block(x) + x0.new_ones(x.shape) * ramp.to(next(self.parameters()).device) + torch.zeros_like(x0)
        return self.head(torch.cat([x, x0], dim=-1)[..., :WIDTH] + x0.detach())


class Dropped(Language):
    """Dropout in the model's own code, before, between and after the blocks, of a module and as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = x0 = self.drop(self.embed(input_ids))
        for block in self.blocks:
            x = self.drop(block(x)) + F.dropout(x0, 0.1, self.training)
        return self.head(F.dropout(x, 0.1, self.training))


class Routed(Language):
    """Whole numbers and truth values that weights have made cross boundaries too."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        best, is_large = x.argmax(-1, keepdim=True), x > 0.1
        for block in self.blocks:
            x = block(x)
            x = x + x.gather(-1, best) * is_large
        return self.head(x)


class Parts(Language):
    """Modules of blocks that the model calls by itself."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = x0 = self.embed(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block.mix(block.norm(x + x0)))  # type: ignore[operator, union-attr]
        return self.head(x)


class Flattened(Language):
    """Blocks work on rows of all samples, [samples x tokens, features]."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = x0 = self.embed(input_ids).flatten(0, 1)
        for block in self.blocks:
            x = block(x) + x0
        return self.head(x).unflatten(0, input_ids.shape)


class _TwoUses(Block):
    """A linear layer's weight is used by its module and by the block's own code."""

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(input=self.norm(x)) + F.linear(torch.tanh(x), self.mix.weight)
        return x + torch.tanh(mixed)


class TwoUses(Language):
    block = _TwoUses


class _Automatic(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x + torch.tanh(self.mix(x))


class Automatic(Language):
    """Blocks compute under an autocast of their own."""

    block = _Automatic


# -- layers that share weights, blocks that exchange more than tensors -------------------------------


class Dropping(Block):
    """A block with two draws of dropout, one of them in a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.drop(torch.tanh(self.mix(self.norm(x)))), 0.1, self.training)


class Repeated(Language):
    """One block, called four times (ALBERT), with other masks each time; its logits are those of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Dropping()])
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for _ in range(4):
            x = self.blocks[0](x)
        return self.head(x)


class ThreeStages(Language):
    """Six blocks; one norm is used by all, one weight by three of them as an argument, and it is a part of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            x = self.norm(block(x))
            if index % 2:
                x = x * self.gain
        return self.head(x * self.gain)


class _Caching(Block):
    def forward(self, x: Tensor, kept: dict[str, Tensor], states: list[Tensor]) -> Tensor:  # type: ignore[override]
        if "keys" not in kept:
            kept["keys"] = self.mix(x)
        x = super().forward(x) + 0.1 * kept["keys"]
        states.append(x)
        if len(states) > 2:
            del states[0]
        return x


class Caching(Language):
    """Later blocks read what the first has put into a dictionary (shared keys and values), and states out of a list."""

    block = _Caching

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        kept: dict[str, Tensor] = {}
        states: list[Tensor] = []
        for block in self.blocks:
            x = block(x, kept, states)
        return self.head(x + sum(states) * 0.5)


# -- what is refused -------------------------------------------------------------------------------


class _Keeping(Block):
    kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        _Keeping.kept = self.mix(x) if _Keeping.kept is None else _Keeping.kept
        return x + torch.tanh(_Keeping.kept)


class Hidden(Language):
    """The first block leaves a tensor for the others in an attribute."""

    block = _Keeping

    def forward(self, input_ids: Tensor) -> Tensor:
        _Keeping.kept = None
        return super().forward(input_ids)


class Carrier:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class _Carrying(Block):
    def forward(self, carrier: Carrier) -> Carrier:  # type: ignore[override]
        return Carrier(super().forward(carrier.x))


class Carried(Language):
    """An object that is no container passes from block to block."""

    block = _Carrying

    def forward(self, input_ids: Tensor) -> Tensor:
        carrier = Carrier(self.embed(input_ids))
        for block in self.blocks:
            carrier = block(carrier)
        return self.head(carrier.x)


class Bag:
    """Tensors in a list, and an object within the object."""

    def __init__(self, x: Tensor) -> None:
        self.seen, self.inner, self.name = [x.mean(-1, keepdim=True)], Carrier(x), "bag"


class _Bagging(Block):
    def forward(self, bag: Bag, scale: Carrier) -> Bag:  # type: ignore[override]
        found = Bag(super().forward(bag.inner.x) * scale.x)
        found.seen += bag.seen
        return found


class Bags(Language):
    """An object with a list and another object passes from block to block, beside one that all of them read."""

    block = _Bagging

    def forward(self, input_ids: Tensor) -> Tensor:
        bag = Bag(self.embed(input_ids))
        scale = Carrier(bag.inner.x.abs().mean(-1, keepdim=True) + 0.5)
        for block in self.blocks:
            bag = block(bag, scale)
        return self.head(bag.inner.x + sum(bag.seen[1:], bag.seen[0]))


class _Writing(Block):
    def forward(self, carrier: Carrier) -> Carrier:  # type: ignore[override]
        carrier.x = super().forward(carrier.x)
        return carrier


class Written(Carried):
    """Each block writes into the one object, and returns it."""

    block = _Writing


class Twice(Language):
    """The blocks are run twice, so the first stage would have to go on after the last."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(x)


class WrittenThroughView(Language):
    """A row of a tensor is written through a view of it that was made before the blocks."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        sums = torch.zeros_like(x)
        row = sums[:, 0]
        for block in self.blocks:
            x = block(x)
            row += x.mean(1)
        return self.head(x + sums)
