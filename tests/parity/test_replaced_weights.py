"""A new parameter in a weight's place: the run holds, saves and resumes what is trained, as a plain loop has it, or refuses."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.errors import ModelError, UnprovenError
from samestep.examination.examine import Source
from samestep.layout import Layout
from samestep.runtime.optimizers.optimizer_source import optimizer_source
from samestep.runtime.run import Run
from tests.laboratory import in_loop, job_of, run_from
from tests.parts import Points
from tests.pool import pool

_STEPS = 5


def _assigned(code: Any, value: Tensor, *, is_trained: bool = True) -> None:
    code.weight = nn.Parameter(value, requires_grad=is_trained)


class Codebook(nn.Module):
    """A linear layer whose outputs are rounded to the nearest code; codes follow the means of what is rounded to them, or fade.

    From its `first` call on, and then in `every` so many, `put` places them in its embedding; what is rounded is so to the new codes or to
    the old ones, and gradients pass to the codes or go by.
    """

    def __init__(
        self,
        put: Callable[[Any, Tensor], object] = _assigned,
        first: int = 1,
        every: int = 1,
        *,
        rounds_to_new: bool = True,
        passes_gradients: bool = False,
        fades: bool = False,
    ) -> None:
        super().__init__()
        self.linear, self.code, self.calls = nn.Linear(4, 4), nn.Embedding(8, 4), 0
        self.put, self.first, self.every = put, first, every
        self.rounds_to_new, self.passes_gradients, self.fades = rounds_to_new, passes_gradients, fades

    def value(self, z: Tensor, nearest: Tensor) -> Tensor:
        kept = 0.9 * self.code.weight
        return kept if self.fades else kept + 0.1 * nn.functional.one_hot(nearest, 8).to(z).T @ z

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        nearest = torch.cdist(z, self.code.weight).argmin(-1)
        codes = self.code(nearest)
        if self.training:
            self.calls += 1
            if self.calls >= self.first and self.calls % self.every == 0:
                with torch.no_grad():
                    self.put(self.code, self.value(z, nearest))
        if self.rounds_to_new:
            codes = self.code(nearest)
        return z + (codes if self.passes_gradients else (codes - z).detach())


class Buffer(nn.Module):
    """Codes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        nearest = torch.cdist(z, self.codes).argmin(-1)
        if self.training:
            self.codes = 0.9 * self.codes + 0.1 * nn.functional.one_hot(nearest, 8).to(z).T @ z.detach()
        return z + (self.codes[nearest] - z).detach()


class Tied(Codebook):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.code.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * self.head(x).sum()


class OtherModule(Codebook):
    def __init__(self) -> None:
        super().__init__(lambda _, value: setattr(self, "code", nn.Embedding.from_pretrained(value, freeze=False)))


_of = functools.partial(functools.partial, Codebook)
BUILDS: dict[str, Callable[[], nn.Module]] = {
    "assigned": Codebook,
    "frozen": _of(functools.partial(_assigned, is_trained=False)),
    "registered": _of(lambda code, value: code.register_parameter("weight", nn.Parameter(value))),
    "direct": _of(lambda code, value: code._parameters.update(weight=nn.Parameter(value)), rounds_to_new=False),
    "data": _of(lambda code, value: setattr(code.weight, "data", value)),
    "sometimes": _of(every=2),
    "later": _of(first=3),
    "buffer": Buffer,
    "still": _of(first=10**6),
    "fading": _of(fades=True),  # whatever the samples are, so that every part of a batch has the same
    "fading later": _of(first=3, fades=True),
    "trained": _of(passes_gradients=True),
    "trained before": _of(passes_gradients=True, rounds_to_new=False),
    "tied": Tied,
    "added": _of(lambda code, value: code.register_parameter("more", nn.Parameter(value))),
    "other module": OtherModule,
}
REPLACING = [*BUILDS][:8]


def _between(model: nn.Module, step: int, place: str) -> None:
    """What a loop does between two steps."""
    if step not in (1, 3):
        return
    layer: Any = model.get_submodule(place)
    with torch.no_grad():
        layer.weight = nn.Parameter(layer.weight.detach().clone() * 0.5)


def _pair(build: str, layout: str, rank: int = 0, world: int = 1) -> tuple[Run, nn.Module]:
    """Return a run, and a plain model with the same values."""
    torch.manual_seed(1)
    model = BUILDS[build]().to(torch.float64)
    job = job_of(steps=_STEPS, optimizer={"options": {}})
    source = optimizer_source(_sgd, None)
    return run_from(Source(model, samestep.building.loss.mse, source), layout, job, rank, world), copy.deepcopy(model)


_sgd = functools.partial(torch.optim.SGD, lr=0.1)


def _compared(rank: int, world: int, build: str, layout: str, place: str, folder: str) -> tuple[float, float, float]:
    """Return the largest differences from a plain loop, in losses and in what is gathered, and of the latter after a resume."""
    run, plain = _pair(build, layout, rank, world)
    optimizer, loss_error = _sgd([*plain.parameters()]), 0.0
    for batch in samestep.batches(Points(40), run.job):
        loss = run.step(batch).loss
        samples: Any = batch.samples(batch.indices)
        optimizer.zero_grad()
        expected = nn.functional.mse_loss(plain(samples["x"]), samples["labels"])
        expected.backward()
        optimizer.step()
        loss_error = max(loss_error, abs(loss - expected.item()))
        if place:
            _between(run.model, batch.step, place)
            _between(plain, batch.step, place)
    whole, again = run.state_dict(on_every_rank=True), _pair(build, layout, rank, world)[0]
    run.save(folder)
    again.load(folder)
    again.prepare(batch.samples([0]))
    resumed, wanted = again.state_dict(on_every_rank=True), plain.state_dict()
    return loss_error, *(max(float((one[n] - wanted[n]).abs().max()) for n in wanted) for one in (whole, resumed))


@pytest.mark.parametrize("build", REPLACING)
def test_a_forward_that_replaces_a_weight_is_that_of_a_plain_loop(build: str, tmp_path: Path) -> None:
    assert max(_compared(0, 1, build, "dp=1", "", str(tmp_path))) < 1e-9


def test_a_loop_that_replaces_a_weight_between_steps_is_a_plain_one(tmp_path: Path) -> None:
    assert max(_compared(0, 1, "still", "dp=1", "code", str(tmp_path))) < 1e-9


@pytest.mark.parametrize(("build", "layout"), [("fading", "dp=2"), ("fading", "dp=2 zero=1"), ("still", "dp=2 zero=1")])
def test_what_is_the_same_for_every_part_of_a_batch_is_put_on_every_rank(
    build: str, layout: str, tmp_path: Path
) -> None:
    place = "code" if build == "still" else ""
    found = pool(2).run(_compared, build, layout, place, str(tmp_path))
    assert max(max(errors) for errors in found) < 1e-9


def _refused(rank: int, world: int, build: str, layout: str, place: str) -> tuple[int, str]:
    """Return the number of steps that were taken until one was refused, and why it was."""
    run, _ = _pair(build, layout, rank, world)
    for batch in samestep.batches(Points(40), run.job):
        try:
            run.step(batch)
        except UnprovenError as error:
            return batch.step, str(error)
        if place:
            _between(run.model, batch.step, place)
    return _STEPS, "it was not refused"


@pytest.mark.parametrize(
    ("build", "layout", "place", "taken", "why"),
    [
        ("trained", "dp=1", "", 0, "a gradient reaches it.*nothing trains it. Use code.weight.copy_"),
        ("trained before", "dp=1", "", 0, "a gradient reaches it.*nothing trains it. Use code.weight.copy_"),
        ("still", "dp=1", "linear", 2, "the place of linear.weight, and a gradient reaches it"),
        ("tied", "dp=1", "", 0, "the place of code.weight, which is head.weight too"),
        ("added", "dp=1", "", 0, "code.more is a new weight, which the run neither trains nor saves"),
        ("other module", "dp=1", "", 0, "code was replaced by another module"),
        ("fading later", "dp=2", "", 2, "the place of code.weight, and dp=2 divides the batch"),
        ("fading later", "dp=2 zero=2", "", 2, "writes into the weight code.weight, and under zero=2 into a copy"),
        ("fading later", "dp=2 zero=3", "", 2, "writes into the weight code.weight, and under zero=3 into a copy"),
        (
            "still",
            "dp=2 zero=3",
            "code",
            2,
            "the loop puts .* code.weight, and under zero=3 each rank holds a part. Use zero=1",
        ),
    ],
)
def test_what_would_be_another_run_is_refused_by_name_in_front_of_the_update(
    build: str, layout: str, place: str, taken: int, why: str
) -> None:
    ranks = Layout(layout).world_size
    told = pool(ranks).run(_refused, build, layout, place) if ranks > 1 else [_refused(0, 1, build, layout, place)]
    for found, text in told:
        assert found == taken
        with pytest.raises(UnprovenError, match=why):
            raise UnprovenError("forward-state", text, "state")


def test_a_parametrization_and_a_wrapper_of_a_module_are_no_other_weights() -> None:
    run, _ = _pair("still", "dp=1")
    stream = samestep.batches(Points(40), run.job)
    run.step(next(stream))
    changes: list[Callable[[Any], object]] = [
        lambda model: nn.utils.parametrizations.orthogonal(model.linear),
        lambda model: setattr(model, "linear", nn.Sequential(model.linear)),
    ]
    for change in changes:
        change(run.model)
        run.step(next(stream))


class Keeps(nn.Module):
    """A linear layer whose parameters an attribute holds too."""

    def __init__(self, kept: Callable[[nn.Module], Any], read: Callable[[Any], Tensor] | None = None) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(4, 4), read
        self.kept = kept(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if self.read is None else self.linear(x) + self.read(self.kept)


def _learned(model: Any, layout: str = "dp=1") -> list[float]:
    run = samestep.parallelize(
        model,
        lambda outputs, batch: ((outputs - batch["labels"]).square().sum(), len(outputs)),
        lambda params: torch.optim.SGD(params, lr=0.01),
        layout=layout,
        job=in_loop(job_of(steps=2)),
    )
    return [run.step(batch).loss for batch in samestep.batches(Points(40), run.job)]


KEPT: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda module: dict(module.named_parameters()), lambda kept: kept["linear.weight"].sum(0)),
    "groups": (lambda module: [{"params": [module.linear.weight]}], lambda kept: kept[0]["params"][0].mT[0]),
    "tuple": (lambda module: ((module.linear.weight,),), lambda kept: nn.functional.softplus(kept[0][0][0])),
    "object": (lambda module: SimpleNamespace(linear=module.linear.weight), lambda kept: kept.linear.T[0]),
}


class Table:
    """A plain object of a model, with numbers of its own and more in a dict."""

    def __init__(self) -> None:
        self.steps, self.more = torch.linspace(0.1, 1.0, 4), {"scale": torch.full((4,), 0.5)}


@pytest.mark.parametrize("layout", ["dp=1", "dp=1 microbatch=2"])
def test_numbers_of_a_plain_object_are_those_of_an_attribute(layout: str) -> None:
    found = _learned(lambda: Keeps(lambda _: Table(), lambda kept: kept.steps * kept.more["scale"]), layout)
    assert found == _learned(
        lambda: Keeps(lambda _: vars(Table()), lambda kept: kept["steps"] * kept["more"]["scale"]), layout
    )


@pytest.mark.parametrize(("kind", "is_instance"), [*zip(KEPT, (False, True, True, False), strict=True)])
def test_a_parameter_that_an_attribute_keeps_is_refused_where_it_is_read(kind: str, is_instance: bool) -> None:
    kept, read = KEPT[kind]
    with pytest.raises(
        ModelError, match=r"reads the parameter linear.weight from the attribute kept\.\S*0|kept\.linear"
    ):
        _learned(Keeps(kept, read) if is_instance else lambda: Keeps(kept, read))
    assert _learned(lambda: Keeps(kept)) == _learned(lambda: Keeps(lambda _: None))
