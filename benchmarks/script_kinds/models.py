"""Models and losses of the kinds that have always run: language models, vision, several models, inner loops, random numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.script_kinds.kind import DATA, UNCUT, Kind, Port, Table, adam, numbers, sgd, usual, whole_numbers
from benchmarks.script_kinds.losses import Block, Encoder, points
from benchmarks.script_kinds.states import cross_entropy


class Gpt(nn.Module):
    """A small GPT with tied embeddings, as nanoGPT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(16, 8), nn.Embedding(6, 8)
        self.attention = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        h = self.embed(ids) + self.positions(torch.arange(length, device=ids.device))
        mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        for attention, block in zip(self.attention, self.blocks, strict=True):
            h = block(h + attention(h, h, h, attn_mask=mask, need_weights=False)[0])
        return self.head(h)


def texts() -> Table:
    return Table(ids=whole_numbers(16, 32, 6), labels=whole_numbers(16, 32, 6, seed=1))


def token_mean(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


class Vit(nn.Module):
    """Patches, a class token and encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(1, 8, 2, stride=2), nn.Parameter(torch.zeros(1, 1, 8))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).mT
        h = torch.cat([self.token.expand(len(h), 1, 8), h], 1)
        for block in self.blocks:
            h = block(h)
        return self.head(h[:, 0])


def pictures() -> Table:
    return Table(x=numbers(32, 1, 6, 6), labels=whole_numbers(4, 32))


class ResNet(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.norm2, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.first(x)))
        h = F.relu(h + self.norm2(self.second(h)))
        return self.head(h.mean((2, 3)))


class SimSiam(nn.Module):
    """Two views, a projector with batch norm, and a stopped gradient (Chen & He 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm, self.predictor = Encoder(), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        z1, z2 = self.norm(self.net(first)), self.norm(self.net(second))
        return self.predictor(z1), self.predictor(z2), z1.detach(), z2.detach()


def simsiam(outputs: Any, batch: Any) -> Tensor:
    p1, p2, z1, z2 = outputs
    return -(F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean()) / 2


def simsiam_sum(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    return simsiam(outputs, batch) * len(outputs[0]), len(outputs[0])


class Seq2Seq(nn.Module):
    """GRUs with attention (torch's tutorial)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(12, 8), nn.GRU(8, 8, batch_first=True)
        self.decoder, self.head = nn.GRUCell(16, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        keys, last = self.encoder(self.embed(ids))
        h, found = last[0], []
        for t in range(target.shape[1]):
            weights = (keys @ h[:, :, None]).softmax(1)
            h = self.decoder(torch.cat([self.embed(target[:, t]), (weights * keys).sum(1)], 1), h)
            found.append(self.head(h))
        return torch.stack(found, 1)


def pairs() -> Table:
    return Table(
        ids=whole_numbers(12, 32, 5), target=whole_numbers(12, 32, 4, seed=1), labels=whole_numbers(12, 32, 4, seed=2)
    )


class Dlrm(nn.Module):
    """Embeddings of categories, whose products are features."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10, 4) for _ in range(3))
        self.bottom, self.top = nn.Linear(8, 4), nn.Linear(4 + 6, 1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        dense = self.bottom(x).relu()
        rows = torch.stack([dense, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        products = (rows @ rows.mT)[:, [0, 0, 0, 1, 1, 2], [1, 2, 3, 2, 3, 3]]
        return self.top(torch.cat([dense, products], 1))[:, 0]


def clicks() -> Table:
    return Table(x=numbers(32, 8), ids=whole_numbers(10, 32, 3), labels=(numbers(32, seed=1) > 0).double())


def clicked(outputs: Tensor, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, batch["labels"])


def clicked_sum(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.binary_cross_entropy_with_logits(outputs, batch["labels"], reduction="sum"), len(outputs)


class Mamba(nn.Module):
    """A selective scan, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.rate = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        keep, added, state, found = torch.exp(-F.softplus(self.rate(x))), self.inner(x), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = keep[:, t] * state + added[:, t]
            found.append(state)
        return self.head(torch.stack(found, 1))


class Maml(nn.Module):
    """One inner step by gradients of gradients, for each sample's own task (Finn et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 8), nn.Linear(8, 1)

    def net(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) @ w.mT + b

    def forward(self, x: Tensor, y: Tensor, query: Tensor) -> Tensor:
        w = self.second.weight.expand(len(x), 1, 8)
        b = self.second.bias.expand(len(x), 1, 1)
        inner = (self.net(x, w, b) - y).square().mean((1, 2)).sum()
        of_w, of_b = torch.autograd.grad(inner, (w, b), create_graph=True)
        return self.net(query, w - 0.1 * of_w, b - 0.1 * of_b)[..., 0]


def tasks() -> Table:
    return Table(
        x=numbers(32, 5, 1), y=numbers(32, 5, 1, seed=1), query=numbers(32, 5, 1, seed=2), labels=numbers(32, 5, seed=3)
    )


def squared(outputs: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(outputs, batch["labels"])


class Pinn(nn.Module):
    """A network whose second derivative the loss reads (Raissi et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = self.net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        return ddu + u


def pinn(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.square().mean()


def pinn_sum(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs.square().sum(), outputs.numel()


class Lora(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2)).requires_grad_(False)
        self.a = nn.ModuleList(nn.Linear(8, 2, bias=False) for _ in range(2))
        self.b = nn.ModuleList(nn.Linear(2, 8, bias=False) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block, a, b in zip(self.blocks, self.a, self.b, strict=True):
            x = block(x) + b(a(x))
        return self.head(x)


class Ctc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).log_softmax(-1)


def speech() -> Table:
    return Table(x=numbers(32, 7, 8), labels=whole_numbers(4, 32, 3) + 1)


def ctc(outputs: Tensor, batch: Any) -> Tensor:
    """torch's mean: each sample's loss over the length of its text, then over samples."""
    return F.ctc_loss(
        outputs.transpose(0, 1), batch["labels"], torch.full((len(outputs),), 7), torch.full((len(outputs),), 3)
    )


def ctc_sum(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return ctc(outputs, batch) * len(outputs), len(outputs)


# -- random numbers in the forward ------------------------------------------------------------------


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(4), nn.Linear(2, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)
        return self.decoder(z), kl


def vae(outputs: Any, batch: Any) -> Tensor:
    return (outputs[0] - batch["x"]).square().sum(-1).mean() + outputs[1].mean()


def vae_sum(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    return (outputs[0] - batch["x"]).square().sum() + outputs[1].sum(), len(outputs[1])


class Diffusion(nn.Module):
    """The forward draws times and noise, gathers their factors from a table, and returns the mean loss (Ho et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.times = Encoder(8), nn.Embedding(10, 8)
        self.register_buffer("kept", torch.linspace(0.99, 0.1, 10))

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(0, 10, (len(x),), device=x.device)
        noise, kept = torch.randn_like(x), self.kept.gather(-1, t)[:, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self.net(noisy + self.times(t)), noise)


# -- several models --------------------------------------------------------------------------------


def policies() -> dict[str, nn.Module]:
    torch.manual_seed(1)
    policy, reference = Gpt(), Gpt()
    reference.load_state_dict(policy.state_dict())
    return {"policy": policy, "reference": reference.requires_grad_(False)}


def preferences() -> Table:
    return Table(chosen=whole_numbers(16, 32, 6), rejected=whole_numbers(16, 32, 6, seed=1))


def logprobs(model: Any, ids: Tensor) -> Tensor:
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].sum(-1)


def margins(models: Any, batch: Any) -> Tensor:
    found = [logprobs(models[name], batch[key]) for name in ("policy", "reference") for key in ("chosen", "rejected")]
    return (found[0] - found[1]) - (found[2] - found[3])


def dpo_sum(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return -F.logsigmoid(0.1 * outputs).sum(), len(outputs)


def teachers() -> dict[str, nn.Module]:
    return {"student": Encoder(4), "teacher": Encoder(4).requires_grad_(False)}


def distilled(models: Any, batch: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        teacher = models["teacher"](batch["x"])
    return models["student"](batch["x"]), teacher


def distillation_sum(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    student, teacher = ((one / 2).log_softmax(-1) for one in outputs)
    soft = F.kl_div(student, teacher, reduction="sum", log_target=True) * 4
    return F.cross_entropy(outputs[0], batch["labels"], reduction="sum") + soft, len(outputs[0])


def several(name: str, build: Any, data: Any, forward: Any, loss: Any, **more: Any) -> Kind:
    """A script with several models, of which the first is trained."""

    def plain(models: dict[str, nn.Module], batches: list[Any]) -> list[float]:
        optimizer, losses = adam(next(iter(models.values())).parameters()), []
        for batch in batches:
            total, count = loss(forward(models, batch), batch)
            optimizer.zero_grad()
            (total / count).backward()
            optimizer.step()
            losses.append((total / count).item())
        return losses

    def port(given: Port, models: Any) -> None:
        run = given.parallelize(models, loss, adam, forward=forward)
        for batch in given.batches():
            given.losses.append(run.step(batch).loss)

    return Kind(name, build, data, plain, port, **more)


KINDS = [
    usual("nanoGPT", Gpt, texts, token_mean, "cross_entropy"),
    usual("ViT", Vit, pictures, cross_entropy, "cross_entropy"),
    usual("ResNet", ResNet, pictures, cross_entropy, "cross_entropy", sgd, layouts=DATA),
    usual("SimSiam", SimSiam, lambda: Table(first=numbers(32, 8), second=numbers(32, 8, seed=1)), simsiam, simsiam_sum),
    usual("seq2seq with attention", Seq2Seq, pairs, token_mean, "cross_entropy", layouts=DATA),
    usual("DLRM", Dlrm, clicks, clicked, clicked_sum, layouts=UNCUT),
    usual("Mamba", Mamba, texts, token_mean, "cross_entropy", layouts=UNCUT),
    usual("MAML", Maml, tasks, squared, "mse", layouts=DATA),
    usual("PINN", Pinn, lambda: Table(x=numbers(32, 1)), pinn, pinn_sum, layouts=DATA),
    usual("LoRA by hand", Lora, points, cross_entropy, "cross_entropy"),
    usual("CTC", Ctc, speech, ctc, ctc_sum),
    usual("VAE", Vae, lambda: Table(x=numbers(32, 8)), vae, vae_sum, draws=True),
    usual("denoising diffusion", Diffusion, lambda: Table(x=numbers(32, 8)), lambda o, b: o, "model", draws=True),
    several("DPO", policies, preferences, margins, dpo_sum),
    several("distillation", teachers, points, distilled, distillation_sum),
]
