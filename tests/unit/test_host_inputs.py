"""Inputs of blocks on the host: what is alive on the device, in which order copies begin, and the same bits as without."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samestep.datasets import batches
from samestep.errors import ModelError
from samestep.program.ops import Op, OpKind
from samestep.runtime.axes import host_inputs
from samestep.runtime.axes.host_inputs import HostInputs, HostLanes
from tests.laboratory import job_of, make_run
from tests.models import Tokens

CPU = torch.device("cpu")


class Watched(HostLanes):
    """HostLanes that note each copy, and how many tensors of earlier ones are on the device when it begins."""

    log: ClassVar[list[str]] = []
    alive: ClassVar[list[int]] = []

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._sources: list[Any] = []
        self._fetched: list[Any] = []

    def to_host(self, tensor: Tensor, layer: str) -> tuple[Tensor, Any]:
        self._note("out", self._sources)
        self._sources.append(weakref.ref(tensor.untyped_storage()))
        return super().to_host(tensor, layer)

    def from_host(self, copy: Tensor, layer: str) -> tuple[Tensor, Any]:
        self._note("back", self._fetched)
        found = super().from_host(copy, layer)
        self._fetched.append(weakref.ref(found[0].untyped_storage()))
        return found

    def _note(self, word: str, earlier: list[Any]) -> None:
        self.log.append(word)
        self.alive.append(sum(one() is not None for one in earlier))


def trained(layout: str, steps: int = 2) -> list[Tensor]:
    run = make_run(0, 1, "deep_llama", layout, job_of("float32", steps))
    for batch in batches(Tokens(), job_of("float32", steps)):
        run.step(batch)
    return [piece.master().clone() for piece in run.updater.pieces]


def test_a_run_has_the_bits_of_one_without_and_inputs_leave_and_come_back_in_order(monkeypatch):
    plain = trained("dp=1 microbatch=4")
    monkeypatch.setattr(host_inputs, "HostLanes", Watched)
    Watched.log.clear()
    Watched.alive.clear()
    found = trained("dp=1 microbatch=4 recompute=offload")
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))
    moved = 3  # of four blocks
    assert Watched.log == (["out"] * moved + ["back"] * moved) * (len(Watched.log) // (2 * moved))
    assert len(Watched.log) >= 2 * 2 * moved


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor, seen: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        x = torch.tanh(self.linear(x))
        x = x if seen is None else x + seen
        return x if scale is None else x * scale


def stack(count: int, *, on_host: bool) -> tuple[nn.ModuleList, HostInputs]:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(count))
    layers = [SimpleNamespace(is_block=True, name=str(index)) for index in range(len(blocks))]
    ops = [Op(kind=OpKind.OFFLOAD, owner=str(index), layer=index) for index in range(count - 1)]
    program: Any = SimpleNamespace(
        bodies={"F": ops}, chunks=(), step=SimpleNamespace(model=SimpleNamespace(layers=layers))
    )
    inputs = HostInputs(program, CPU)
    for index, block in enumerate(blocks):
        if on_host:
            around, forward = inputs.around(index, str(index)), block.forward

            def call(*args: Any, around: Any = around, forward: Any = forward, **kwargs: Any) -> Any:
                return checkpoint(around(forward, args, kwargs), use_reentrant=False)

            block.forward = call
    return blocks, inputs


def gradients(
    *, on_host: bool, count: int = 4, times: int = 1, named: bool = False, shared: bool = False
) -> list[Tensor]:
    blocks, _ = stack(count, on_host=on_host)
    leaf = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
    seen, x = (leaf.cos() if shared else None), leaf.sin()
    for block in blocks:
        x = block(x=x, seen=seen) if named else block(x, seen)
    for _ in range(times):
        x.pow(2).sum().backward(retain_graph=True)
    return [leaf.grad, *(param.grad for param in blocks.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize(
    "case", [{}, {"named": True}, {"shared": True}, {"times": 2}, {"times": 2, "shared": True, "named": True}]
)
def test_gradients_are_those_without_by_place_by_name_of_shared_tensors_and_twice(case: dict[str, Any]) -> None:
    for one, other in zip(gradients(on_host=False, **case), gradients(on_host=True, **case), strict=True):
        assert torch.equal(one, other)


def test_of_earlier_inputs_one_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_inputs, "HostLanes", Watched)
    Watched.log.clear()
    Watched.alive.clear()
    gradients(on_host=True, count=8)
    assert Watched.log == ["out"] * 7 + ["back"] * 7
    assert Watched.alive == [0, *[1] * 6, 0, *[1] * 6]


def test_a_tensor_that_all_blocks_are_given_is_copied_once() -> None:
    before = host_inputs.num_copies
    gradients(on_host=True, shared=True)
    assert host_inputs.num_copies == before + 3 + 1


def test_copies_are_gone_with_the_graph() -> None:
    blocks, inputs = stack(4, on_host=True)
    x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True) * 1.0
    for block in blocks:
        x = block(x)
    copies = []
    call = inputs._latest._before
    while call is not None:
        copies += [weakref.ref(one) for one in call.inputs.values()]
        call = call._before
    assert len(copies) == 3
    x.sum().backward()
    del x, call
    assert [one for one in copies if one() is not None] == []


def test_a_write_into_an_input_behind_its_block_is_refused() -> None:
    blocks, _ = stack(3, on_host=True)
    first = torch.ones(2, 4, dtype=torch.float64, requires_grad=True) * 1.0
    x = blocks[0](first)
    first.mul_(2.0)
    with pytest.raises(ModelError, match=r"writes into the input of 0 .*Use .*recompute=none"):
        blocks[1](x)
