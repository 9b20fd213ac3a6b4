"""Code that a model holds, in lambdas, hooks and weak references, reads the weights that the run trains."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep import Job
from samestep.building.module_copies import deep_copy
from samestep.errors import ModelError

LINEAR: nn.Module | None = None


class Model(nn.Module):
    """A linear layer between an embedding and a head; `hold` puts a function around it into the model."""

    apply_linear: Any

    def __init__(self, hold: Callable[[Model], Any]) -> None:
        super().__init__()
        self.embed, self.linear, self.head = nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32)
        self.kept: list[Tensor] = []
        self.apply_linear = hold(self)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(F.gelu(self.apply_linear(self.embed(input_ids))))


def _nested(model: Model) -> Any:
    inner = lambda x: model.linear(x)  # noqa: E731

    def around(x: Tensor) -> Tensor:
        return inner(x) * 1.0

    return around


def _decorated(model: Model) -> Any:
    @functools.wraps(torch.relu)
    def applied(x: Tensor, *, layer: nn.Module = model.linear) -> Tensor:
        return layer(x)

    return applied


def _hooked(model: Model) -> Any:
    model.linear.register_forward_hook(lambda _, __, output: model.kept.append(output))

    def applied(x: Tensor) -> Tensor:
        model.linear(x)
        return model.kept.pop()

    return applied


def _weak(model: Model) -> Any:
    part = nn.Identity()
    part.owner = weakref.ref(model)
    part.forward = lambda x: part.owner().linear(x)  # type: ignore[operator]
    return part


def _unregistered(model: Model) -> Any:
    rows = [nn.Sequential(model.linear, nn.Tanh())]
    return lambda x: rows[0](x)


def _recursive(model: Model) -> Any:
    def applied(x: Tensor, times: int = 2) -> Tensor:
        return applied(model.linear(x), times - 1) if times else x

    return applied


def _bound(model: Model) -> Any:
    before = model.linear.forward

    def doubled(_: nn.Module, x: Tensor) -> Tensor:
        return 2.0 * before(x)

    model.linear.forward = types.MethodType(doubled, model.linear)  # type: ignore[method-assign]
    return lambda x: model.linear(x)


HELD: dict[str, Callable[[Model], Any]] = {
    "lambda": lambda model: lambda x: model.linear(x),
    "nested functions": _nested,
    "default": lambda model: lambda x, layer=model.linear: layer(x),
    "keyword default": _decorated,
    "partial": lambda model: functools.partial(lambda layer, x: layer(x), model.linear),
    "method": lambda model: model.linear.forward,
    "function bound to a module": _bound,
    "hook": _hooked,
    "weak reference": _weak,
    "unregistered module": _unregistered,
    "recursion": _recursive,
}


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.roll(-1)}


def _summed(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    labels = batch["labels"]
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def _trained(source: Any) -> list[float]:
    job = Job(train={"global_batch": 4, "steps": 3})
    run = samestep.parallelize(source, _summed, functools.partial(torch.optim.SGD, lr=0.5), job=job)
    return [run.step(_batch()).loss for _ in range(3)]


def _by_hand(model: nn.Module) -> list[float]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), list[float]()
    for _ in range(3):
        batch = _batch()
        total, count = _summed(model(batch["input_ids"]), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        found.append(total.item() / count)
    return found


def _drawn(hold: Callable[[Model], Any]) -> Model:
    torch.manual_seed(3)
    return Model(hold)


@pytest.mark.parametrize("kind", HELD)
def test_an_instance_learns_as_in_a_loop_by_hand(kind: str) -> None:
    assert _trained(_drawn(HELD[kind])) == pytest.approx(_by_hand(_drawn(HELD[kind])), rel=1e-6)


def _holding_a_global(model: Model) -> Any:
    global LINEAR
    LINEAR = model.linear
    return lambda x: LINEAR(x)  # type: ignore[misc]


class Trainer:
    """An object of the code around a model, which knows the model."""

    def __init__(self) -> None:
        self.model: Model | None = None
        self.seen: list[tuple[int, ...]] = []


def _through_another_object(model: Model) -> Any:
    trainer = Trainer()
    trainer.model = model
    return lambda x: trainer.model.linear(x)  # type: ignore[union-attr]


@pytest.mark.parametrize("hold", [_holding_a_global, _through_another_object])
def test_an_instance_that_code_outside_of_it_holds_learns_as_in_a_loop_by_hand(hold: Callable[[Model], Any]) -> None:
    found = _trained(_drawn(hold))
    assert found == pytest.approx(_by_hand(_drawn(hold)), rel=1e-6)


def test_weights_that_a_run_does_not_train_are_refused() -> None:
    trainer = Trainer()

    def through_one_object(model: Model) -> Any:
        trainer.model = model
        return lambda x: trainer.model.linear(x)  # type: ignore[union-attr]

    for hold in (_holding_a_global, through_one_object):
        with pytest.raises(ModelError, match=r"the forward reads linear.weight .*Use a module that is read from self"):
            _trained(functools.partial(Model, hold))


def test_a_function_with_a_parameter_itself_is_refused() -> None:
    def hold(model: Model) -> Any:
        weight = model.linear.weight
        return lambda x: F.linear(x, weight)

    with pytest.raises(ModelError, match=r"linear.weight itself in a variable around it"):
        _trained(functools.partial(Model, hold))


@pytest.mark.parametrize("view", [lambda weight: weight, lambda weight: weight.T, lambda weight: weight[2:].detach()])
def test_a_function_with_the_memory_of_a_parameter_is_refused(view: Callable[[Tensor], Tensor]) -> None:
    def hold(model: Model) -> Any:
        part = view(model.linear.weight)
        return lambda x: model.linear(x) + (x @ part.mT).sum(-1, keepdim=True)

    with pytest.raises(ModelError, match=r"linear.weight itself in a variable around it"):
        _trained(Model(hold))


def test_a_function_may_hold_a_view_of_a_frozen_parameter() -> None:
    def hold(model: Model) -> Any:
        part = model.embed.weight.requires_grad_(False).detach()[:8]
        return lambda x: model.linear(x) + x @ part

    assert _trained(_drawn(hold)) == pytest.approx(_by_hand(_drawn(hold)), rel=1e-6)


def test_a_function_with_a_tensor_of_the_build_is_refused() -> None:
    def hold(model: Model) -> Any:
        gain = torch.randn(8)
        return lambda x: model.linear(x) * gain

    assert _trained(_drawn(hold)) == pytest.approx(_by_hand(_drawn(hold)), rel=1e-6)
    with pytest.raises(ModelError, match=r"a tensor of shape \[8\] in a variable around it, .*Use a buffer "):
        _trained(functools.partial(Model, hold))


def test_frozen_weights_elsewhere_are_constants() -> None:
    teacher = nn.Linear(8, 8)
    model = _drawn(lambda model: lambda x: model.linear(x) + teacher(x).detach())
    assert _trained(model) == pytest.approx(
        _by_hand(_drawn(lambda model: lambda x: model.linear(x) + teacher(x).detach())), rel=1e-6
    )


def test_what_belongs_to_the_code_around_stays_shared() -> None:
    trainer, counts = Trainer(), {"calls": 0}
    model = _drawn(HELD["lambda"])
    trainer.model = model

    def report(_: nn.Module, __: Any, output: Tensor) -> None:
        counts["calls"] += 1
        trainer.seen.append((*output.shape,))

    model.linear.register_forward_hook(report)
    copied: Any = deep_copy(model, {})
    copied(_batch()["input_ids"])
    assert (counts["calls"], trainer.seen, trainer.model) == (1, [(4, 6, 8)], model)


def test_functions_share_their_variables_in_a_copy() -> None:
    def hold(model: Model) -> Any:
        layer, number = model.linear, 0

        def count() -> int:
            nonlocal layer, number
            layer, number = nn.Identity(), number + 1  # type: ignore[assignment]
            return number

        model.count = count  # type: ignore[assignment]
        return lambda x: layer(x)

    model = _drawn(hold)
    copied: Any = deep_copy(model, {})
    copied.count()
    x = torch.ones(1, 8)
    assert copied.apply_linear(x) is x, "one variable of two functions"
    assert model.apply_linear(x) is not x, "and another one around the copied module"
