"""Scripts of reinforcement learning whose loop lets the language model that it trains write the answers that it learns from."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from benchmarks.script_kinds.kind import Kind, Port, Table, adam, whole_numbers
from benchmarks.script_kinds.models import Gpt

PROMPT, LENGTH = 3, 6
Batch = dict[str, Tensor]


class Policy(Gpt):
    def forward(self, ids: Tensor, **rest: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids)


class ActorCritic(nn.Module):
    """A policy whose body has a head for the value of each place too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.words, self.value = Gpt(), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, ids: Tensor, **rest: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(ids)
        return self.words(hidden), self.value(hidden)[..., 0]


def prompts() -> Table:
    return Table(ids=whole_numbers(16, 8, PROMPT))


def answered(logits_of: Any, ids: Tensor, drawn: torch.Generator) -> Tensor:
    """Return prompts with sampled answers behind them, one token at a time."""
    while ids.shape[1] < LENGTH:
        chances = logits_of(ids)[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=drawn)], 1)
    return ids


def of_answers(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities of the answers' tokens, [B, answer]."""
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[:, PROMPT - 1 :, 0]


def reward(ids: Tensor) -> Tensor:
    return (ids[:, PROMPT:] % 3 == 0).double().mean(1) + 0.01 * ids[:, PROMPT:].double().mean(1)


# -- GRPO: four answers of each prompt, two updates on them ----------------------------------------


@torch.no_grad()
def group(model: Any, step: int, drawn: torch.Generator) -> Batch:
    ids = answered(model, whole_numbers(16, 2, PROMPT, seed=step).repeat_interleave(4, 0), drawn)
    rewards = reward(ids).view(2, 4)
    advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return {"ids": ids, "old": of_answers(model(ids), ids), "advantage": advantage.view(-1)}


def clipped(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
    ratio, advantage = (of_answers(logits, batch["ids"]) - batch["old"]).exp(), batch["advantage"][:, None]
    losses = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return losses.sum(), losses.numel()


def grpo_plain(model: Any, _: list[Any]) -> list[float]:
    optimizer, losses, drawn = adam(model.parameters()), [], torch.Generator().manual_seed(0)
    for step in range(3):
        batch = group(model, step, drawn)
        for _ in range(2):
            total, count = clipped(model(batch["ids"]), batch)
            optimizer.zero_grad()
            (total / count).backward()
            optimizer.step()
            losses.append(total.item() / count)
    return losses


def grpo_port(given: Port, model: Any) -> None:
    run = given.parallelize(model, clipped, adam)
    drawn = torch.Generator().manual_seed(0)
    for step in range(3):
        with run.gathered() as whole:
            batch = group(whole, step, drawn)
        given.losses += [run.step(batch).loss for _ in range(2)]


# -- PPO: advantages by GAE, and two epochs of minibatches, in each of which they are whitened ------


@torch.no_grad()
def rollout(model: Any, step: int, drawn: torch.Generator) -> Batch:
    ids = answered(lambda one: model(one)[0], whole_numbers(16, 16, PROMPT, seed=step), drawn)
    logits, values = model(ids)
    values = values[:, PROMPT - 1 : -1]
    rewards, advantage, last = torch.zeros_like(values), torch.zeros_like(values), torch.zeros_like(values[:, 0])
    rewards[:, -1] = reward(ids)
    for t in reversed(range(values.shape[1])):
        then = values[:, t + 1] if t + 1 < values.shape[1] else torch.zeros_like(last)
        last = rewards[:, t] + then - values[:, t] + 0.95 * last
        advantage[:, t] = last
    return {"ids": ids, "old": of_answers(logits, ids), "advantage": advantage, "returns": advantage + values}


def ppo(outputs: Any, batch: Any) -> Tensor:
    logits, values = outputs
    advantage = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
    ratio = (of_answers(logits, batch["ids"]) - batch["old"]).exp()
    policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
    value = F.mse_loss(values[:, PROMPT - 1 : -1], batch["returns"])
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    return policy + 0.1 * value - 0.01 * entropy


def minibatches(model: Any, step: int, drawn: torch.Generator) -> list[Batch]:
    batch = rollout(model, step, drawn)
    rows = [part for _ in range(2) for part in torch.randperm(16, generator=drawn).split(8)]
    return [{name: column[part] for name, column in batch.items()} for part in rows]


def ppo_plain(model: Any, _: list[Any]) -> list[float]:
    optimizer, losses, drawn = adam(model.parameters()), [], torch.Generator().manual_seed(0)
    for step in range(2):
        for batch in minibatches(model, step, drawn):
            loss = ppo(model(batch["ids"]), batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
    return losses


def ppo_port(given: Port, model: Any) -> None:
    run = given.parallelize(model, samestep.whole_batch(ppo), adam)
    drawn = torch.Generator().manual_seed(0)
    for step in range(2):
        with run.gathered() as whole:
            parts = minibatches(whole, step, drawn)
        given.losses += [run.step(batch).loss for batch in parts]


KINDS = [
    Kind("GRPO with its own answers", Policy, prompts, grpo_plain, grpo_port, train={"steps": 6}),
    Kind(
        "PPO with its own answers", ActorCritic, prompts, ppo_plain, ppo_port,
        train={"steps": 8}, tables={"optimizer": {"clip_norm": 0.5}},
    ),
]  # fmt: skip
