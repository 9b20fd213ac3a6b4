"""The loops that a person would write by hand in torch alone, for `host.py`: each yields the loss of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import host_models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from host_models import loss_mean, rotated
from torch import Tensor, nn
from torch.utils.data import DataLoader

CLIP_NORM = 1.0


class Case(Protocol):
    """The words of a row that its peer needs."""

    model: str
    options: dict[str, Any]
    precision: str
    microbatches: int
    samples: int


def adamw(params: Any) -> torch.optim.Optimizer:
    """Return the optimizer of all contestants."""
    return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def _batches(case: Case) -> Iterator[tuple[Tensor, Tensor]]:
    return iter(DataLoader(host_models.Samples(case.model), batch_size=case.samples))  # type: ignore[arg-type]


def _loop(case: Case, net: nn.Module, masters: list[nn.Parameter] | None = None) -> Iterator[float]:
    """Take steps with a model that is ready: with `masters` in float32 of weights in bfloat16."""
    params, loader = [*net.parameters()], _batches(case)
    updated = masters or params
    optimizer = adamw(updated)
    while True:
        total: Any = 0.0
        for number in range(case.microbatches):
            given, labels = next(loader)
            is_last = number == case.microbatches - 1
            if hasattr(net, "set_requires_gradient_sync"):
                net.set_requires_gradient_sync(is_last)
            loss = loss_mean(net(given), labels) / case.microbatches
            loss.backward()
            total = total + loss.detach()
        if masters is not None:
            for master, param in zip(masters, params, strict=True):
                assert param.grad is not None
                master.grad, param.grad = param.grad.float(), None
        nn.utils.clip_grad_norm_(updated, CLIP_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        if masters is not None:
            with torch.no_grad():
                torch._foreach_copy_(params, masters)
        yield total.item()


def _in_precision(case: Case, model: nn.Module) -> list[nn.Parameter] | None:
    """Cast a model to bfloat16 if the row asks for it, and return its float32 masters."""
    if case.precision == "float32":
        return None
    masters = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
    model.bfloat16()
    return masters


def plain(case: Case) -> Iterator[float]:
    """One process: forward, backward, clipping, update; with masters by hand in bfloat16."""
    model = host_models.build(case.model, **case.options)
    return _loop(case, model, _in_precision(case, model))


def ddp(case: Case) -> Iterator[float]:
    """DistributedDataParallel, the leanest that it can be."""
    model = host_models.build(case.model, **case.options)
    masters = _in_precision(case, model)
    wrap = nn.parallel.DistributedDataParallel
    return _loop(case, wrap(model, gradient_as_bucket_view=True, broadcast_buffers=False), masters)


class _NormOverRanks(torch.autograd.Function):
    """Batch norm with the statistics of all ranks, as SyncBatchNorm has it on GPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: nn.BatchNorm2d, weight: Tensor, bias: Tensor) -> Tensor:
        channels, momentum = x.shape[1], norm.momentum
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
        mine = torch.cat([mean.new_full((1,), x.numel() // channels), mean, variance])
        rows = mine.new_empty(dist.get_world_size(), 1 + 2 * channels)
        dist.all_gather_into_tensor(rows.view(-1), mine)
        counts, means, variances = rows.split([1, channels, channels], dim=1)
        count = counts.sum(0)
        shares = counts / count
        mean = (shares * means).sum(0)
        variance = (shares * (variances + (means - mean).square())).sum(0)
        norm.running_mean.mul_(1 - momentum).add_(mean * momentum)  # type: ignore[union-attr,operator]
        norm.running_var.mul_(1 - momentum).add_(variance * (count / (count - 1)) * momentum)  # type: ignore[union-attr,operator]
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.eps = norm.eps
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, norm.eps, False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight, mean, variance, count = ctx.saved_tensors
        inverse = (variance + ctx.eps).rsqrt()
        _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, torch.ones_like(inverse), None, None, mean, inverse, True, ctx.eps, [False, True, True]
        )
        sums = torch.stack([of_bias, of_weight])
        dist.all_reduce(sums)
        scale = inverse * weight
        s, t = (scale * (sums / count)).unbind()
        through = torch.batch_norm(x, t, s, mean, variance, False, 0.0, ctx.eps, False)
        return (gradient * scale.view(-1, 1, 1)).sub_(through), None, of_weight, of_bias


def ddp_with_norms_over_ranks(case: Case) -> Iterator[float]:
    """DistributedDataParallel, with batch norms over all ranks in one function of autograd."""
    model = host_models.build(case.model, **case.options)

    def forward(self: Any, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        normalised: Tensor = _NormOverRanks.apply(x, self, self.weight, self.bias)
        return normalised

    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.forward = forward.__get__(module)  # type: ignore[method-assign]
    wrap = nn.parallel.DistributedDataParallel
    return _loop(case, wrap(model, gradient_as_bucket_view=True, broadcast_buffers=False))


def sharded(case: Case) -> Iterator[float]:
    """FSDP2, one unit a block."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = host_models.build(case.model, **case.options)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if case.precision == "bf16" else MixedPrecisionPolicy()
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return _loop(case, model)


class _Copy(torch.autograd.Function):
    """The identity, whose gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient


class _Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def tensor_parallel(case: Case) -> Iterator[float]:
    """Megatron's cut of a block in two functions of autograd."""
    model = host_models.build(case.model, **case.options)
    rank, world = dist.get_rank(), dist.get_world_size()

    def cut(module: nn.Linear, dim: int) -> None:
        module.weight = nn.Parameter(module.weight.detach().chunk(world, dim)[rank].clone())

    def forward(self: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = _Copy.apply(self.norm1(x))
        q, k, v = (part(y).unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        x = x + _Sum.apply(self.o(mixed.transpose(1, 2).flatten(2)))
        y = _Copy.apply(self.norm2(x))
        return x + _Sum.apply(self.down(F.silu(self.gate(y)) * self.up(y)))

    for block in model.blocks:  # type: ignore[union-attr]
        for name in ("q", "k", "v", "gate", "up"):
            cut(getattr(block, name), 0)
        for name in ("o", "down"):
            cut(getattr(block, name), 1)
        block.forward = forward.__get__(block)
    return _loop(case, model)


class _Stage(nn.Module):
    """Half of the blocks of a Llama, with the embedding or the head."""

    def __init__(self, model: Any, rank: int) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        self.first = model.embed if rank == 0 else None
        self.blocks = model.blocks[:half] if rank == 0 else model.blocks[half:]
        self.last = None if rank == 0 else nn.Sequential(model.norm, model.head)
        self.register_buffer("cos", model.cos)
        self.register_buffer("sin", model.sin)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first is None else self.first(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x if self.last is None else self.last(x)


def pipeline(case: Case) -> Iterator[float]:
    """One-forward-one-backward by torch.distributed.pipelining, two stages cut by hand."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    module = _Stage(host_models.build(case.model, **case.options), rank)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, case.microbatches, loss_fn=loss_mean)
    samples: Any = host_models.Samples(case.model)
    loader = iter(DataLoader(samples, batch_size=case.samples * case.microbatches))
    params = [*module.parameters()]
    optimizer = adamw(params)
    while True:
        (given, labels), losses = next(loader), []
        if rank == 0:
            schedule.step(given)
        else:
            schedule.step(target=labels, losses=losses)
        nn.utils.clip_grad_norm_(params, CLIP_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        yield float(sum(loss.item() for loss in losses)) / case.microbatches


PEERS = {
    "a loop by hand": plain,
    "DDP": ddp,
    "DDP and an autograd function": ddp_with_norms_over_ranks,
    "fully_shard": sharded,
    "two autograd functions": tensor_parallel,
    "torch's Schedule1F1B": pipeline,
}
