"""MLPs in chunks of tokens: which modules they are, and what a chunked module does with other calls and half precision."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.errors import LayoutError, ModelError
from samestep.layout import Layout
from samestep.runtime.axes import chunked_mlp
from samestep.runtime.axes.chunked_mlp import _Part
from tests.laboratory import clipped, source_of


class Mlp(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 24, dtype=dtype), nn.Linear(24, 6, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x.view(-1, x.shape[-1])))).view(x.shape)


def chunked(module: nn.Module, tokens: int, sums: torch.dtype = torch.float64) -> nn.Module:
    module.forward = _Part("mlp", module, tokens, sums, lambda: (nullcontext(), nullcontext())).call
    return module


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    module(x).square().sum().backward()
    return [x.grad, *(param.grad for param in module.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("tokens", [1, 7, 1000])
def test_outputs_and_gradients_are_those_of_the_whole(tokens: int) -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before = chunked_mlp.num_chunks
    for one, other in zip(gradients(Mlp(), x), gradients(chunked(Mlp(), tokens), x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    size = max(1, tokens // 2)
    assert chunked_mlp.num_chunks - before == (0 if size >= 5 else -(-5 // size))


def test_a_chunk_keeps_its_input_alone() -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(1, 8, 6, dtype=torch.float64, requires_grad=True)
    module = chunked(Mlp(), 2)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        module(x)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]


def test_gradients_of_chunks_in_half_precision_are_added_up_in_float32() -> None:
    x = torch.randn(1, 256, 6, generator=torch.Generator().manual_seed(2))
    exact = gradients(Mlp(torch.float32), x)
    with torch.no_grad():
        whole, apart = Mlp(torch.float32).bfloat16(), Mlp(torch.float32).bfloat16()
    found, plain = gradients(chunked(apart, 1, torch.float32), x.bfloat16()), gradients(whole, x.bfloat16())
    for one, other, right in zip(found[1:], plain[1:], exact[1:], strict=True):
        scale = right.abs().max()
        assert (one.float() - right).abs().max() <= 2 * (other.float() - right).abs().max() + 0.01 * scale


@pytest.mark.parametrize("shape", [(10, 6), (2, 2, 5, 6)])
def test_a_call_of_another_shape_runs_as_it_is(shape: tuple[int, ...]) -> None:
    x, before = torch.randn(*shape, dtype=torch.float64), chunked_mlp.num_chunks
    for one, other in zip(gradients(Mlp(), x), gradients(chunked(Mlp(), 1), x), strict=True):
        assert torch.equal(one, other)
    assert chunked_mlp.num_chunks == before


def test_a_frozen_weight_and_an_input_without_gradient() -> None:
    def run(module: Any) -> list[Tensor | None]:
        module.up.weight.requires_grad_(False)
        module(torch.ones(1, 4, 6, dtype=torch.float64)).sum().backward()
        return [param.grad for param in module.parameters()]

    for one, other in zip(run(Mlp()), run(chunked(Mlp(), 1)), strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.allclose(one, other)


class Counts(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Leaves(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


class WritesInput(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.relu_())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Counts, r"forward of mlp writes mlp\.calls, and mlp_chunk runs it once a chunk"),
        (Leaves, r"forward of mlp writes mlp\.last, and mlp_chunk runs it once a chunk"),
        (WritesInput, "mlp writes into its own input, and mlp_chunk gives it a part of it"),
    ],
)
def test_a_part_that_leaves_something_behind_is_refused_by_name(kind: type[Mlp], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        chunked(kind(), 2)(torch.randn(2, 8, 6, dtype=torch.float64, requires_grad=True).sin())


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Module()
        self.block.mlp = Mlp()


def test_a_part_in_which_weights_are_gathered_by_themselves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_mlp, "chunked_owners", lambda _: frozenset(["block.mlp"]))

    def apply(*modules: str, gathers: bool = True) -> None:
        layout = SimpleNamespace(mlp_chunk=4, gathers_weights=gathers)
        step = SimpleNamespace(layout=layout, master_dtype="float32", model=None)
        program: Any = SimpleNamespace(step=step, units=(SimpleNamespace(modules=modules),))
        chunked_mlp.apply(Inner(), program, lambda: (nullcontext(), nullcontext()))

    with pytest.raises(
        LayoutError, match=r"block\.mlp once for all chunks, and block\.mlp\.up in it is gathered by itself. Use zero=1"
    ):
        apply("block", "block.mlp.up")
    apply("block", "block.mlp")
    apply("block", "block.mlp.up", gathers=False)


@pytest.mark.parametrize("model", ["deep_llama", "deep_gpt2"])
def test_the_parts_of_a_family_are_its_mlps(model: str) -> None:
    prepared = source_of(model, Layout("dp=1"), clipped()).prepared
    assert prepared is not None
    blocks = [layer for layer in prepared.spec.layers if layer.is_block]
    assert blocks
    for layer in blocks:
        assert [part.owner for part in layer.token_parts] == [f"{layer.modules[0]}.mlp"]
        (part,) = layer.token_parts
        assert 0 < part.saved_elements < layer.saved_elements
        assert part.boundary_elements == 2 * layer.output_elements
