"""Language models as public scripts have them: their own optimizers, islands of precision, memories, rare experts, pairs, encoders."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.script_kinds.data import segments, tokens_sum
from benchmarks.script_kinds.kind import (
    DATA,
    GLOBAL_BATCH,
    STEPS,
    UNCUT,
    Kind,
    Port,
    Table,
    adam,
    numbers,
    usual,
    whole_numbers,
)
from benchmarks.script_kinds.losses import returned, whole
from benchmarks.script_kinds.models import Gpt, texts, token_mean
from benchmarks.script_kinds.optimizers import Muon

# -- nanochat and modded-nanogpt -------------------------------------------------------------------


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of [samples, tokens, heads, features]."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)


class ChatAttention(nn.Module):
    """Fewer heads of keys than of queries, norms of both, and embeddings of values behind a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.c_q, self.c_k = nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)
        self.c_v, self.c_proj = nn.Linear(8, 4, bias=False), nn.Linear(8, 8, bias=False)
        self.ve_gate = nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor, ve: Tensor | None, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        samples, tokens, _ = x.shape
        q = self.c_q(x).view(samples, tokens, 2, 4)
        k, v = (one(x).view(samples, tokens, 1, 4) for one in (self.c_k, self.c_v))
        if ve is not None:
            v = v + (2 * torch.sigmoid(self.ve_gate(x[..., :4]))).unsqueeze(-1) * ve.view(samples, tokens, 1, 4)
        q, k = norm(rotated(q, *cos_sin)), norm(rotated(k, *cos_sin))
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(samples, tokens, -1))


class ChatMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class ChatBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = ChatAttention(), ChatMlp()

    def forward(self, x: Tensor, ve: Tensor | None, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attn(norm(x), ve, cos_sin)
        return x + self.mlp(norm(x))


class Nanochat(nn.Module):
    """nanochat's model: the loss comes from the forward, logits are capped in float32, scalars weigh the residual sums."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(16, 8), "h": nn.ModuleList(ChatBlock() for _ in range(2))}
        )
        self.lm_head = nn.Linear(8, 16, bias=False)
        self.resid_lambdas, self.x0_lambdas = nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((2,), 0.1))
        self.value_embeds = nn.ModuleDict({"1": nn.Embedding(16, 4)})
        angles = torch.outer(torch.arange(32.0), 1.0 / 10000 ** (torch.arange(0, 4, 2) / 4))
        self.register_buffer("cos", angles.cos()[None, :, None], persistent=False)
        self.register_buffer("sin", angles.sin()[None, :, None], persistent=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None, loss_reduction: str = "mean") -> Tensor:
        tokens = idx.size(1)
        assert tokens <= self.cos.size(1), "the rotary cache is too short"
        cos_sin = self.cos[:, :tokens], self.sin[:, :tokens]
        x = x0 = norm(self.transformer.wte(idx))
        for i, block in enumerate(self.transformer.h):
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            ve = self.value_embeds[str(i)](idx) if str(i) in self.value_embeds else None
            x = block(x, ve, cos_sin)
        logits = self.lm_head(norm(x)).float()
        logits = 15 * torch.tanh(logits / 15)
        if targets is None:
            return logits
        return F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1, reduction=loss_reduction
        )


def chat_groups(model: nn.Module) -> tuple[list[Any], list[Tensor]]:
    """nanochat's groups: AdamW's with rates of their own, and the matrices, which Muon has."""
    named = dict(model.named_parameters())
    of = lambda *words: [p for n, p in named.items() if any(word in n for word in words)]  # noqa: E731
    rates = [
        {"params": of("lm_head"), "lr": 4e-3},
        {"params": of("wte", "value_embeds"), "lr": 2e-2},
        {"params": of("resid_lambdas"), "lr": 5e-3},
        {"params": of("x0_lambdas"), "lr": 5e-2, "betas": (0.96, 0.95)},
    ]
    return rates, of("transformer.h")


def chat_adam(groups: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)


def chat_texts() -> Table:
    targets = whole_numbers(16, 32, 6, seed=1)
    targets[::3, :2] = -1
    return Table(idx=whole_numbers(16, 32, 6), targets=targets)


def chat_plain(model: Any, batches: list[Any]) -> list[float]:
    rates, matrices = chat_groups(model)
    made, losses = [chat_adam(rates), Muon(matrices)], []
    for one in made:
        for group in one.param_groups:
            group["initial_lr"] = group["lr"]
    for step, batch in enumerate(batches):
        loss = model(batch["idx"], batch["targets"])
        loss.backward()
        for one in made:
            for group in one.param_groups:
                group["lr"] = group["initial_lr"] * (1 - step / STEPS)
            one.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def chat_port(given: Port, model: Any) -> None:
    rates, matrices = chat_groups(model)
    made = [chat_adam(rates), Muon(matrices)]
    for one in made:
        for group in one.param_groups:
            group["initial_lr"] = group["lr"]
    run = given.parallelize(model, "model", made)
    for batch in given.batches():
        for one in made:
            for group in one.param_groups:
                group["lr"] = group["initial_lr"] * (1 - batch.step / STEPS)
        given.losses.append(run.step(batch).loss)


class CastedLinear(nn.Linear):
    """modded-nanogpt's layer, whose weights are cast to the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.type_as(x), None if self.bias is None else self.bias.type_as(x))


class ModdedBlock(nn.Module):
    def __init__(self, has_attention: bool) -> None:
        super().__init__()
        self.qkv_w = nn.Parameter(torch.randn(3, 8, 8) * 0.3) if has_attention else None
        self.c_proj = CastedLinear(8, 8) if has_attention else None
        self.c_fc, self.c_out = CastedLinear(8, 16), CastedLinear(16, 8)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x: Tensor, ve: Tensor | None, x0: Tensor) -> Tensor:
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        if self.qkv_w is not None and self.c_proj is not None:
            shape = *x.shape[:2], 6, 4
            q, k, v = F.linear(norm(x), self.qkv_w.flatten(end_dim=1).type_as(x)).view(shape).chunk(3, dim=-2)
            v = v if ve is None else v + 0.5 * ve.view_as(v)
            q, k, v = (one.transpose(1, 2) for one in (norm(q), norm(k), v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.12)
            x = x + self.c_proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.c_out(F.relu(self.c_fc(norm(x))).square())


class Modded(nn.Module):
    """modded-nanogpt's model: skips as in a U-Net, embeddings of values, a sum over tokens as its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.value_embeds = nn.Embedding(16, 8), nn.ModuleList(nn.Embedding(16, 8) for _ in range(2))
        self.blocks = nn.ModuleList(ModdedBlock(i != 1) for i in range(4))
        self.skip_weights = nn.Parameter(torch.ones(2))
        self.lm_head = CastedLinear(8, 16, bias=False)

    def forward(self, input_seq: Tensor, target_seq: Tensor) -> Tensor:
        ve = [value_embed(input_seq) for value_embed in self.value_embeds]
        values = [ve[0], ve[1], None, ve[0]]
        x = x0 = norm(self.embed(input_seq))
        skips: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            if i >= 2:
                x = x + self.skip_weights[i - 2] * skips.pop()
            x = block(x, values[i], x0)
            if i < 2:
                skips.append(x)
        logits = self.lm_head(norm(x)).float()
        logits = 30 * torch.sigmoid(logits / 7.5)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), target_seq.view(-1), reduction="sum")


def modded_texts() -> Table:
    return Table(input_seq=whole_numbers(16, 32, 6), target_seq=whole_numbers(16, 32, 6, seed=1))


# -- x-transformers --------------------------------------------------------------------------------


class XRotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 4, 2).float() / 4))

    def forward(self, t: Tensor) -> Tensor:
        with torch.autocast(t.device.type, enabled=False):
            freqs = torch.einsum("i , j -> i j", t.type_as(self.inv_freq), self.inv_freq)
            return torch.cat((freqs, freqs), dim=-1)


class XBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.to_q = nn.Parameter(torch.ones(8)), nn.Linear(8, 8, bias=False)
        self.to_kv, self.to_out = nn.Linear(8, 16, bias=False), nn.Linear(8, 8, bias=False)
        self.ff = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, 8))

    def normed(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * math.sqrt(8) * self.gamma

    def forward(self, x: Tensor, freqs: Tensor, mask: Tensor | None) -> Tensor:
        h = self.normed(x)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (self.to_q(h), *self.to_kv(h).chunk(2, dim=-1)))
        q, k = (t * freqs.cos() + torch.cat((-t[..., 2:], t[..., :2]), -1) * freqs.sin() for t in (q, k))
        dots = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.5
        tokens = dots.shape[-1]
        causal = torch.ones((tokens, tokens), device=x.device, dtype=torch.bool).triu(1)
        dots = dots.masked_fill(causal, -torch.finfo(dots.dtype).max)
        if mask is not None:
            dots = dots.masked_fill(~mask[:, None, None, :], -torch.finfo(dots.dtype).max)
        out = torch.einsum("b h i j, b h j d -> b h i d", dots.softmax(dim=-1, dtype=torch.float32).type(v.dtype), v)
        x = x + self.to_out(out.transpose(1, 2).flatten(2))
        return x + self.ff(self.normed(x))


class XTransformer(nn.Module):
    """The decoder and its wrapper: it is given tokens, cuts inputs and targets out of them, and returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.token_emb, self.rotary = nn.Embedding(16, 8), XRotary()
        self.layers, self.to_logits = nn.ModuleList(XBlock() for _ in range(2)), nn.Linear(8, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inp, target = x[:, :-1], x[:, 1:]
        mask = inp != -100
        h = self.token_emb(inp.masked_fill(~mask, 0))
        freqs = self.rotary(torch.arange(inp.shape[1], device=x.device))
        for layer in self.layers:
            h = layer(h, freqs, mask)
        return F.cross_entropy(self.to_logits(h).transpose(1, 2), target, ignore_index=-100)


def ragged_tokens() -> Table:
    ids = whole_numbers(16, 32, 7)
    ids[::3, 5:] = -100
    return Table(x=ids)


# -- memories, experts, layers that are dropped ----------------------------------------------------


class XlBlock(nn.Module):
    """Attention over the memory and the segment, with positions relative to the query (Dai et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_net, self.o_net, self.norm = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False), nn.LayerNorm(8)
        self.r_net, self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, w: Tensor, r: Tensor, bias: Tensor, mask: Tensor, mems: Tensor | None) -> Tensor:
        tokens, samples = w.shape[1], w.shape[0]
        cat = w if mems is None else torch.cat([mems, w], 1)
        q, k, v = self.qkv_net(cat).chunk(3, -1)
        q, k, v = (one.view(samples, -1, 2, 4) for one in (q[:, -tokens:], k, v))
        position = torch.einsum("bind,jnd->bnij", q + bias, self.r_net(r).view(-1, 2, 4))
        padded = F.pad(position, (1, 0)).view(samples, 2, -1, tokens)[:, :, 1:].reshape(position.shape)
        scores = (torch.einsum("bind,bjnd->bnij", q + bias, k) + padded) / 2.0
        if mask.any():
            scores = scores.masked_fill(mask, -1e30)
        out = torch.einsum("bnij,bjnd->bind", scores.softmax(-1), v).reshape(samples, tokens, 8)
        h = self.norm(w + self.o_net(out))
        return h + self.down(F.relu(self.up(h)))


class TransformerXl(nn.Module):
    """Each layer keeps the hidden states of the segment before."""

    def __init__(self) -> None:
        super().__init__()
        self.word_emb, self.drop = nn.Embedding(12, 8), nn.Dropout(0.0)
        self.layers, self.r_w_bias = nn.ModuleList(XlBlock() for _ in range(2)), nn.Parameter(torch.randn(2, 4) * 0.1)
        self.out = nn.Linear(8, 12)
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0.0, 8.0, 2.0) / 8))

    def forward(self, ids: Tensor, carried: Any = None) -> tuple[Tensor, Any]:
        h, tokens = self.drop(self.word_emb(ids)), ids.shape[1]
        kept = 0 if carried is None else carried[0].shape[1]
        mask = torch.triu(h.new_ones(tokens, kept + tokens), 1 + kept).bool()
        angles = torch.outer(torch.arange(kept + tokens - 1, -1, -1.0, device=h.device, dtype=h.dtype), self.inv_freq)
        r, states = torch.cat([angles.sin(), angles.cos()], -1), []
        for index, layer in enumerate(self.layers):
            states.append(h)
            h = layer(h, r, self.r_w_bias, mask, None if carried is None else carried[index])
        return self.out(h), tuple(states)


def lanes_plain(model: nn.Module, _: list[Any]) -> list[float]:
    optimizer, losses, mems = adam(model.parameters()), [], None
    for batch in torch.utils.data.DataLoader(segments(), GLOBAL_BATCH):
        outputs, mems = model(batch["ids"], mems)
        mems = tuple(one.detach() for one in mems)
        loss = F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def lanes_port(given: Port, model: nn.Module) -> None:
    run = given.parallelize(model, tokens_sum, adam, forward=lambda net, batch, carried: net(batch["ids"], carried))
    for batch in given.batches(torch.utils.data.DataLoader(segments(), GLOBAL_BATCH), lanes=True):
        given.losses.append(run.step(batch).loss)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(8, 12, bias=False),
            nn.Linear(12, 8, bias=False),
            nn.Linear(8, 12, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MixtureBlock(nn.Module):
    """The mixture of Mixtral's code: experts that `nonzero` gives their tokens, two for each; with many, some have none."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(8), nn.Linear(8, experts, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).reshape(-1, 8)
        weights, picked = self.gate(tokens).softmax(-1).topk(2, dim=-1)
        weights, found = weights / weights.sum(-1, keepdim=True), torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, which = torch.where(picked == index)
            if rows.numel() == 0:
                continue
            found.index_add_(0, rows, expert(tokens[rows]) * weights[rows, which, None])
        return x + found.view_as(x)


class MixtureModel(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(16, 8), nn.ModuleList(MixtureBlock(experts) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class LayerDrop(Gpt):
    """Whole layers are left out at random, as fairseq does it (Fan et al. 2019)."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            if self.training and float(torch.empty(1).uniform_()) < 0.4:
                continue
            h = block(h)
        return self.head(h)


class Checkpointed(Gpt):
    """Blocks that are computed again in the backward."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.head(h)


class Packed(Gpt):
    """Documents that share a row: attention within each, and positions that begin anew."""

    def forward(self, ids: Tensor) -> Tensor:
        document = (ids == 0).cumsum(1)
        start = torch.where(ids == 0, torch.arange(ids.shape[1], device=ids.device), 0).cummax(1).values
        h = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device) - start)
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
        mask = causal & (document[:, :, None] == document[:, None])
        for attention, block in zip(self.attention, self.blocks, strict=True):
            q, k, v = F.linear(h, attention.in_proj_weight, attention.in_proj_bias).chunk(3, -1)
            q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
            h = block(h + attention.out_proj(y.transpose(1, 2).flatten(2)))
        return self.head(h)


class Rwkv(nn.Module):
    """Time mixing with a decay for each channel, by a loop over tokens (RWKV-LM, version 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.ln = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.decay, self.first, self.mix = (nn.Parameter(torch.randn(8) * 0.3) for _ in range(3))
        self.key, self.value, self.receptance, self.output = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.shift, self.head = nn.ZeroPad2d((0, 0, 1, -1)), nn.Linear(8, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids)
        x = self.ln(h)
        before, mix = self.shift(x), self.mix.sigmoid()
        x = x * mix + before * (1 - mix)
        k, v, r = self.key(x), self.value(x), torch.sigmoid(self.receptance(x))
        top = torch.zeros_like(k[:, 0])
        bottom, most, found = torch.zeros_like(top), torch.full_like(top, -1e38), []
        for t in range(ids.shape[1]):
            high = torch.maximum(most, self.first + k[:, t])
            a, b = (most - high).exp(), (self.first + k[:, t] - high).exp()
            found.append((a * top + b * v[:, t]) / (a * bottom + b))
            high = torch.maximum(most - self.decay.exp(), k[:, t])
            a, b = (most - self.decay.exp() - high).exp(), (k[:, t] - high).exp()
            top, bottom, most = a * top + b * v[:, t], a * bottom + b, high
        return self.head(h + self.output(r * torch.stack(found, 1)))


# -- pairs, sequences to sequences, speech ---------------------------------------------------------


class Rewards(nn.Module):
    """A reward model whose chosen and rejected answers run as one batch, as TRL's `concatenated_forward` has it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Gpt()
        self.score = nn.Linear(16, 1)

    def forward(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        found = self.score(self.body(torch.cat([chosen, rejected])))[:, -1, 0]
        return found[: len(chosen)], found[len(chosen) :]


def answers() -> Table:
    return Table(chosen=whole_numbers(16, 32, 6), rejected=whole_numbers(16, 32, 6, seed=1))


def pairwise(outputs: Any, batch: Any) -> Tensor:
    return -F.logsigmoid(outputs[0] - outputs[1]).mean()


def pairwise_sum(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    return -F.logsigmoid(outputs[0] - outputs[1]).sum(), len(outputs[0])


def grpo(outputs: Tensor, batch: Any) -> Tensor:
    """GRPO: rewards are normalized within the groups of answers to one question, which the data has as rows of 4."""
    logprob = outputs[:, :-1].log_softmax(-1).gather(-1, batch["ids"][:, 1:, None])[..., 0]
    reward = batch["reward"].view(-1, 4)
    advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    ratio = (logprob - batch["old"]).exp()
    loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return (loss.sum(1) / loss.shape[1]).mean()


class TextOnly(Gpt):
    def forward(self, ids: Tensor, **rest: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids)


def grouped_answers() -> Table:
    return Table(ids=whole_numbers(16, 32, 6), reward=numbers(32, seed=1), old=numbers(32, 5, seed=2) * 0.1 - 2.7)


class EncoderDecoder(nn.Module):
    """nn.Transformer as torch's tutorial on translation uses it, with masks for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(12, 8, padding_idx=0), nn.Embedding(12, 8, padding_idx=0)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(8, 12)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = self.transformer.generate_square_subsequent_mask(tgt.shape[1], device=src.device).bool()
        padding = src == 0
        h = self.transformer(
            self.source(src), self.target(tgt), tgt_mask=mask, src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )  # fmt: skip
        return self.generator(h)


def translations() -> Table:
    source, target = whole_numbers(11, 32, 5) + 1, whole_numbers(11, 32, 5, seed=1) + 1
    source[::3, 4:], target[1::3, 3:] = 0, 0
    return Table(src=source, tgt=target[:, :-1], labels=target[:, 1:])


def smoothed(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), ignore_index=0, label_smoothing=0.1)


def smoothed_sum(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    return smoothed(outputs, batch) * (batch["labels"] != 0).sum(), (batch["labels"] != 0).sum()


class Teacher(nn.Module):
    """A decoder that is given the target or its own prediction, by one number of torch for the whole batch (its tutorial has Python's)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(12, 8), nn.GRU(8, 8, batch_first=True)
        self.decoder, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 12)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        _, hidden = self.encoder(self.embed(ids))
        token, found = target[:, :1], []
        forced = bool(torch.rand(()) < 0.5)
        for t in range(target.shape[1]):
            output, hidden = self.decoder(F.relu(self.embed(token)), hidden)
            found.append(self.head(output))
            token = target[:, t + 1 : t + 2] if forced and t + 1 < target.shape[1] else found[-1].argmax(-1).detach()
        return torch.cat(found, 1)


def translated() -> Table:
    return Table(
        ids=whole_numbers(12, 32, 5), target=whole_numbers(12, 32, 4, seed=1), labels=whole_numbers(12, 32, 4, seed=2)
    )


class Transducer(nn.Module):
    """An RNN transducer: an encoder, a prediction network, and a joint one; the loss is its forward algorithm (Graves 2012)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.embed = nn.LSTM(8, 8, batch_first=True), nn.Embedding(5, 8)
        self.predictor, self.joint = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: Tensor, symbols: Tensor) -> Tensor:
        before = F.pad(symbols, (1, 0))
        joint = self.encoder(x)[0][:, :, None] + self.predictor(self.embed(before))[0][:, None]
        return self.joint(torch.tanh(joint)).log_softmax(-1)


def transducer_each(outputs: Tensor, batch: Any) -> Tensor:
    frames, symbols = outputs.shape[1], outputs.shape[2]
    blank = outputs[..., 0]
    emitted = outputs[:, :, :-1].gather(-1, batch["labels"][:, None, :, None].expand(-1, frames, -1, 1))[..., 0]
    rows = [torch.cat([torch.zeros_like(blank[:, 0, :1]), emitted[:, 0].cumsum(1)], 1)]
    for t in range(1, frames):
        row = [rows[-1][:, 0] + blank[:, t - 1, 0]]
        for u in range(1, symbols):
            row.append(torch.logaddexp(rows[-1][:, u] + blank[:, t - 1, u], row[-1] + emitted[:, t, u - 1]))
        rows.append(torch.stack(row, 1))
    return -(rows[-1][:, -1] + blank[:, -1, -1])


def spoken() -> Table:
    symbols = whole_numbers(4, 32, 2) + 1
    return Table(x=numbers(32, 4, 8), symbols=symbols, labels=symbols)


def compiled() -> nn.Module:
    return torch.compile(Gpt(), backend="eager")  # type: ignore[return-value]


def rare(name: str, experts: int, **more: Any) -> Kind:
    return usual(name, lambda: MixtureModel(experts), texts, token_mean, "cross_entropy", **more)


KINDS = [
    Kind("nanochat", Nanochat, chat_texts, chat_plain, chat_port),
    returned("modded-nanogpt, whole", Modded, modded_texts),
    returned("x-transformers, whole", XTransformer, ragged_tokens),
    Kind("Transformer-XL, whole", TransformerXl, texts, lanes_plain, lanes_port, UNCUT),
    rare("mixture of experts", 4),
    rare("mixture with rare experts", 24),
    usual("LayerDrop", LayerDrop, texts, token_mean, "cross_entropy", draws=True),
    usual("checkpointed blocks", Checkpointed, texts, token_mean, "cross_entropy"),
    usual("packed documents", Packed, texts, token_mean, "cross_entropy"),
    usual("torch.compile", compiled, texts, token_mean, "cross_entropy"),
    usual("RWKV", Rwkv, texts, token_mean, "cross_entropy", layouts=UNCUT),
    usual("reward model", Rewards, answers, pairwise, pairwise_sum),
    usual("GRPO", TextOnly, grouped_answers, grpo, whole(grpo)),
    usual("translation", EncoderDecoder, translations, smoothed, smoothed_sum),
    usual("teacher forcing", Teacher, translated, token_mean, "cross_entropy", layouts=DATA, draws=True),
    usual("RNN transducer", Transducer, spoken, lambda o, b: transducer_each(o, b).mean(), lambda o, b: (transducer_each(o, b).sum(), len(o)), layouts=DATA),
]  # fmt: skip
