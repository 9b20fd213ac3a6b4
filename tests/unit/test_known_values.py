"""What a trace on the meta device knows of values: those of whole numbers, and those that code needs to go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.building.initial_values import blueprint
from samestep.errors import ModelError
from samestep.tracing import meta_tensors
from samestep.tracing.trace import trace
from tests.unit.test_trace import spec_of


class Stepping(nn.Module):
    """Looks whether its positions, or a mask made of them, go on from one token to the next, as packed documents are found."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(8, 1), nn.Linear(1, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        steps = torch.diff(positions, prepend=positions[:, :1] - 1)
        mask = torch.cat([torch.ones_like(positions[:, :1]), steps], 1).float()
        x = self.embed(tokens)
        return self.linear(x) if (steps == 1).all() and mask.sum() > len(tokens) else x


@pytest.mark.parametrize("length", [2**16, 2**16 + 1, 2**20 - 1, 2**20, 2**20 + 3])
def test_samples_of_any_length_keep_their_whole_numbers(length: int) -> None:
    spec = spec_of(Stepping, torch.zeros(1, length, dtype=torch.long))
    assert (spec.varies_at, spec.forward_flops) == ("", 2 * length)


torch.library.define("samestep_traces::kept", "(Tensor x) -> Tensor")
torch.library.impl("samestep_traces::kept", "CPU", lambda x: (x.sum(-1) > -100).nonzero().flatten())


class Reading(nn.Module):
    """Does what torch cannot do without values, in a way that no operation is marked with."""

    def __init__(self, code: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.code = nn.Linear(4, 4), code

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x * (1 + 0 * float(self.code(x.detach())))


@pytest.mark.parametrize(
    "code",
    [
        lambda x: len(x[torch.ops.samestep_traces.kept(x)]),
        lambda x: torch.histogram(x, 4).hist.sum(),
        lambda x: x.numpy().sum(),
        lambda x: f"{x.sum():.3f}",
    ],
    ids=["an operation without a fake kernel", "an operation of the host", "numpy", "a format"],
)
def test_what_needs_values_is_run_with_them(code: Callable[[Tensor], Any]) -> None:
    sample = torch.ones(2, 4)
    assert spec_of(lambda: Reading(code), sample).varies_at == "linear"
    with pytest.raises(ModelError, match="looks at the values"):
        trace(blueprint(lambda: Reading(code), 0).module, sample, "no values")


def _under(x: Tensor, linear: nn.Module, *args: Any, **named: Any) -> Tensor:
    with torch.autocast(*args, **named):
        return linear(x).to(x.dtype)


def _cast_inputs(x: Tensor, linear: nn.Module) -> Tensor:
    device = x.device.type
    forward = torch.amp.custom_fwd(lambda ctx, x: x * 2, device_type=device, cast_inputs=torch.float32)
    backward = torch.amp.custom_bwd(lambda ctx, above: above * 2, device_type=device)
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Doubled", (torch.autograd.Function,), methods).apply(linear(x))


@pytest.mark.parametrize(
    "code",
    [
        lambda x, linear: _under(x, linear, x.device.type, enabled=False),
        lambda x, linear: _under(x, linear, device_type=x.device.type, dtype=torch.bfloat16),
        lambda x, linear: torch.amp.autocast(x.device.type, torch.float32)(linear)(x),
        lambda x, linear: x if torch.is_autocast_enabled(x.device.type) else linear(x),
        lambda x, linear: linear(x).to(torch.get_autocast_dtype(x.device.type)).to(x.dtype),
        _cast_inputs,
    ],
    ids=["off", "on", "around a call", "is it on", "its dtype", "in a Function"],
)
def test_autocast_of_the_device_of_a_tensor_is_entered(code: Callable[[Tensor, nn.Module], Tensor]) -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return code(x, self.linear)

    spec = spec_of(Casting, torch.ones(2, 4))
    assert (spec.forward_flops, spec.varies_at) == (2 * 2 * 16, "")
    with pytest.raises(RuntimeError):
        torch.get_autocast_dtype("meta")


class Experts(nn.Module):
    """Sends its rows to the experts that scores choose, in one of the ways in which code does."""

    def __init__(self, how: str, width: int = 8) -> None:
        super().__init__()
        self.how, self.router = how, nn.Linear(width, 3, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.router(rows).softmax(-1).topk(2, -1)
        out = torch.zeros_like(rows)
        if self.how == "counts":
            order, counts = chosen.flatten().argsort(stable=True), torch.bincount(chosen.flatten(), minlength=3)
            parts = (rows[order // 2] * weights.flatten()[order, None]).split(counts.tolist())
            out = out.index_add(0, order // 2, torch.cat([e(p) for e, p in zip(self.experts, parts, strict=True)]))
        for k, expert in enumerate(self.experts if self.how != "counts" else ()):
            if self.how == "nonzero":
                row, slot = (chosen == k).nonzero(as_tuple=True)
                if len(row):
                    out.index_add_(0, row, expert(rows[row]) * weights[row, slot, None])
            elif (picked := (chosen == k).any(-1)).any():
                out[picked] = out[picked] + expert(rows[picked]) * (weights * (chosen == k)).sum(-1)[picked][:, None]
        return out.view(x.shape)


class Mixture(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.blocks = nn.ModuleList(Experts(how) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("how", ["nonzero", "counts", "mask"])
def test_rows_of_experts_are_traced_without_a_value_of_a_weight(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = torch.arange(24)[None]
    known = spec_of(lambda: Mixture(how), sample)
    monkeypatch.setattr(meta_tensors, "KNOWN_WEIGHTS", 0)
    read: list[str] = []
    plan = blueprint(lambda: Mixture(how), 0)
    spec = trace(plan.module, sample, "large", lambda name: read.append(name) or plan.materialize(name))  # type: ignore[func-returns-value]
    assert read == []
    assert (spec.varies_at, spec.varies_within) == (known.varies_at, True)
    assert [layer.name for layer in spec.layers] == [layer.name for layer in known.layers]
    assert [layer.crossing_refusal for layer in spec.layers] == [""] * len(spec.layers)
    assert spec.params == known.params


class Causal(nn.Module):
    """Looks at a mask that is made of shapes alone, as Transformer-XL does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.linear(self.embed(tokens))
        mask = x.new_ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()
        scores = x @ x.mT
        return (scores.masked_fill(mask, -9.0) if mask.any().item() else scores).softmax(-1) @ x


def test_a_look_at_a_mask_of_shapes_varies_nothing() -> None:
    assert spec_of(Causal, torch.zeros(1, 512, dtype=torch.long)).varies_at == ""
