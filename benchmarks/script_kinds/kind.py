"""What a kind of script is: a model, data, the plain loop as its author wrote it, and the port in the lines of samestep.

Both begin with the same weights, and read the same samples: the plain loop is given the whole batch of each step as tensors, the
port the same batches as `samestep.batches` yields them, or whatever its author would hand over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import samestep
from samestep.datasets import read_samples

GLOBAL_BATCH, STEPS = 8, 4
DP1, DP2, ZERO3, TP, PP = "dp=1", "dp=2", "dp=2 zero=3", "tp=2", "pp=2 microbatch=4"
ALL = (DP1, DP2, ZERO3, TP, PP)
DATA = (DP1, DP2, ZERO3)
"""The layouts for a model of which `tp` and `pp` cut nothing: convolutions, recurrent layers, or no blocks."""
UNCUT = (DP1, DP2, ZERO3, TP)
"""The layouts for a model without blocks."""

State = dict[str, Tensor]


class Table(torch.utils.data.Dataset[Any]):
    """A map-style data set of tensors with one row for each sample, as a dict."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole_numbers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@dataclass
class Port:
    """One rank's part of a port: what the script is given, and the run whose weights are compared."""

    kind: Kind
    layout: str
    place: Any
    run: Any = None
    losses: list[float] = field(default_factory=list)

    @property
    def job(self) -> samestep.Job:
        train = {"global_batch": GLOBAL_BATCH, "steps": STEPS, "watch_every": 0, **self.kind.train}
        tables = {"numerics": {"precision": "float64"}, "run": {"device": "cpu"}, **self.kind.tables}
        return samestep.Job(train=train, **tables)

    def parallelize(self, model: Any, loss: Any, optimizer: Any, **more: Any) -> Any:
        self.run = samestep.parallelize(model, loss, optimizer, layout=self.layout, job=self.job, **more)
        return self.run

    def batches(self, source: Any = None, **more: Any) -> Iterable[Any]:
        return samestep.batches(self.kind.data() if source is None else source, self.job, **more)


@dataclass(frozen=True)
class Kind:
    """A kind of script."""

    name: str
    build: Callable[[], Any]
    """Builds the model, or the models of a dict; called after the same seed on both sides."""
    data: Callable[[], Any]
    plain: Callable[[Any, list[Any]], list[float]]
    """The script: takes the model and the whole batch of each step, and returns its losses."""
    port: Callable[[Port, Any], None]
    """The port: takes the model, and notes losses in `Port.losses`."""
    layouts: Sequence[str] = ALL
    draws: bool = False
    """Whether it draws random numbers, which one device of samestep draws in its own way; then layouts are held against that one."""
    train: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)
    ignores: Sequence[str] = ()
    """Names in a state dict that are not compared, such as a counter of forwards."""

    def model(self) -> Any:
        torch.manual_seed(0)
        built = self.build()
        if isinstance(built, nn.Module):
            return built.double()
        return {name: part.double() for name, part in built.items()}

    def whole_batches(self) -> list[Any]:
        """The samples of each step, in the order that `samestep.batches` gives them."""
        port, data = Port(self, DP1, None), self.data()
        return [read_samples(data, batch.indices) for batch in samestep.batches(data, port.job)]


def inputs_of(batch: Any) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "labels"}


def nothing(model: Any, step: int) -> None:
    pass


def usual(
    name: str,
    build: Callable[[], nn.Module],
    data: Callable[[], Any],
    scalar: Callable[[Any, Any], Tensor],
    loss: Any,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adam,
    ours: Callable[[Any], torch.optim.Optimizer] | None = None,
    each: Callable[[Any, int], None] = nothing,
    **more: Any,
) -> Kind:
    """A script with one forward, one loss and one optimizer: `scalar(outputs, batch)` there, and `loss` in the port.

    `each` is what both loops do to the model after a step, and `ours` the optimizer of the port, where it is another.
    """

    def plain(model: nn.Module, batches: list[Any]) -> list[float]:
        made, losses = optimizer([param for param in model.parameters() if param.requires_grad]), []
        for step, batch in enumerate(batches):
            found = scalar(model(**inputs_of(batch)), batch)
            made.zero_grad()
            found.backward()
            made.step()
            losses.append(found.item())
            with torch.no_grad():
                each(model, step)
        return losses

    def port(given: Port, model: nn.Module) -> None:
        known = loss() if getattr(loss, "__name__", "") == "<lambda>" and not loss.__code__.co_argcount else loss
        run = given.parallelize(model, known, ours or optimizer)
        for batch in given.batches():
            given.losses.append(run.step(batch).loss)
            if each is not nothing:
                with run.gathered() as whole, torch.no_grad():
                    each(whole, batch.step)

    return Kind(name, build, data, plain, port, **more)
