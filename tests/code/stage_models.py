"""Models without a list of blocks, whose children a pipeline's stages begin with; images, vectors or tokens to classes.

Dimensions: B samples, C channels, H height, W width, D features, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

from tests.models import LENGTH, VOCABULARY

WIDTH, CLASSES = 6, 4


class ConvNet(nn.Module):
    """Four attributes with a skip, functions between them, and activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(4 * 36, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.conv1(x), inplace=True)
        second = F.relu(self.conv2(first)) + first
        pooled = F.dropout(F.max_pool2d(second, 2).flatten(1), 0.2, self.training)
        return self.fc2(F.relu(self.fc1(pooled)))


class Normed(nn.Module):
    """Batch norms with and without weights, as children of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


class Twice(nn.Module):
    """Two convolutions of one part of a U-Net."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(given, made, 3, padding=1), nn.Conv2d(made, made, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))))


class UNet(nn.Module):
    """Skips over everything that stands between the way down and the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = Twice(3, 3), Twice(3, 4), Twice(4, 6)
        self.up2, self.join2 = nn.ConvTranspose2d(6, 4, 2, stride=2), Twice(8, 4)
        self.up1, self.join1 = nn.ConvTranspose2d(4, 3, 2, stride=2), Twice(6, 3)
        self.out = nn.Conv2d(3, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.middle(F.max_pool2d(second, 2))
        x = self.join2(torch.cat((self.up2(x), second), 1))
        x = self.join1(torch.cat([self.up1(x), first], dim=1))
        return self.out(x).mean((2, 3))


class Coder(nn.Module):
    """An autoencoder whose decoder has the encoder's weights, and one projection twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.squeeze = nn.Linear(WIDTH, 8), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.classes = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        code = self.squeeze(torch.tanh(self.squeeze(torch.tanh(self.encode(x)))))
        return self.classes(F.linear(code, self.encode.weight.t(), self.bias))


class Steps(nn.Module):
    """A cell that is called for each token, with its state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(VOCABULARY, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        state = x.new_zeros(x.shape[0], WIDTH)
        found = []
        for place in range(LENGTH):
            state = self.cell(x[:, place], state)
            found.append(state)
        return self.head(torch.stack(found, 1))


class Wrapped(nn.Module):
    """One child, whose children are called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ConvNet()

    def forward(self, x: Tensor) -> Any:
        return {"logits": self.net(x), "hidden": x.mean()}


@dataclass
class State:
    x: Tensor
    skip: Tensor | None = None


class Structured(nn.Module):
    """Children that pass dictionaries, tuples and data classes to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Pack(WIDTH, 8), Repack(8), Unpack(8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state, skip = self.third(self.second(self.first(x)))
        return self.last(state.x + skip * 0.5)


class Pack(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.linear = nn.Linear(given, made)

    def forward(self, x: Tensor) -> dict[str, Any]:
        made = self.linear(x)
        return {"main": torch.tanh(made), "all": [made, 3]}


class Repack(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, given: dict[str, Any]) -> State:
        return State(self.linear(given["main"]) * given["all"][1], given["all"][0])


class Unpack(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, state: State) -> tuple[State, Tensor]:
        assert state.skip is not None
        return State(self.linear(torch.relu(state.x))), state.skip


class Attending(nn.Module):
    """torch's own attention and encoder layer as attributes, a class token, and parametrised weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.token = nn.Parameter(torch.zeros(8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
        self.narrow = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.token
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(torch.tanh(self.narrow(self.layer(x))))


class OneBlock(nn.Module):
    """A list of a single block, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x))


class Frozen(nn.Module):
    """A frozen stem, and two heads of which one takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(WIDTH, 8), nn.Linear(8, 8)
        self.stem.requires_grad_(False)
        self.spare, self.head = nn.Linear(8, 3), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Any:
        stem = torch.tanh(self.stem(x))
        body = torch.tanh(self.body(stem))
        return {"spare": self.spare(stem), "logits": self.head(body + stem)}


class Single(nn.Module):
    """One call of a module: nothing to divide."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.only(x))


class Kept(nn.Module):
    """What a child keeps, another one reads past its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Keeping(WIDTH, 8), Reading(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        self.last.given = self.first.kept
        return self.last(made)


class Keeping(nn.Linear):
    kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return torch.tanh(self.kept)


class Reading(nn.Linear):
    given: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.given)


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, CLASSES)
    )


class HookedState(nn.Module):
    """A state whose gradient is halved behind the step that makes it, or behind a later one, as unrolled models do (MuZero).

    It is not guarded, or asks `requires_grad` first; a later stage holds the state too, and a gradient of it there.
    """

    def __init__(self, behind: int, how: str = "halved") -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.steps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.behind, self.how = behind, how

    def forward(self, x: Tensor) -> Tensor:
        x = state = torch.tanh(self.first(x))
        for number, step in enumerate(self.steps):
            x = x + torch.tanh(step(x))
            if number == self.behind:
                self.hook(state)
        return self.head(x + state)

    def hook(self, state: Tensor) -> None:
        if self.how == "kept":
            state.retain_grad()
        elif self.how == "halved" or state.requires_grad:
            state.register_hook(lambda gradient: gradient * 0.5)


class HookedModules(nn.Module):
    """Layers with hooks on their gradients: some change them, some only look."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, CLASSES))
        for layer in [*self.layers][1:]:
            if how == "both":
                layer.register_full_backward_hook(lambda _, given, __: (given[0] * 0.5,))
                layer.register_full_backward_pre_hook(lambda _, above: (above[0] * 1.5,))
            else:
                layer.register_full_backward_hook(lambda _, __, above: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(torch.tanh(x))


class Penalized(nn.Module):
    """Adds what it computes of all its weights, wherever they are, to its outputs, as one that returns its penalty does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, CLASSES))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "parameters":
            penalty = sum(weight.abs().sum() for weight in self.parameters())
        else:
            penalty = sum(part.weight.abs().sum() for part in self.modules() if isinstance(part, nn.Linear))
        return self.layers(x) * (1 + 1e-3 * penalty)


class KeptTable(nn.Module):
    """Computes a table in its first call, in the form of the tensor to which it is added, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.tables = dict[int, Tensor]()

    def table(self, like: Tensor) -> Tensor:
        width = like.shape[-1]
        if width not in self.tables:
            self.tables[width] = torch.arange(width).double().sin().to(like)
        return self.tables[width]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x) + self.table(x))
        return self.head(x)


class MaskedOnHost(nn.Module):
    """Attention under a causal mask that the forward makes without a device, beside a mask of padding, as tutorials write it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, dropout, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        causal = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        padding = torch.zeros(input_ids.shape, dtype=x.dtype).masked_fill(
            (input_ids == 0) & (input_ids.cumsum(1) > 0), -9.0
        )
        for block in self.blocks:
            x = x + block(x, x, x, padding, False, causal.to(x.dtype))[0]
        return self.head(x)


class Distributed(nn.Module):
    """Distributions of torch between layers, which look at what they are given: drawn from, asked for densities, or for entropies."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mean, self.spread = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        own = distributions.Normal(self.mean(x), F.softplus(self.spread(x)) + 0.1)
        if self.how == "drawn":
            x = own.rsample()
        else:
            x = x * own.entropy() + distributions.kl_divergence(own, distributions.Normal(x, torch.ones_like(x)))
        return distributions.Categorical(logits=self.head(x)).logits
