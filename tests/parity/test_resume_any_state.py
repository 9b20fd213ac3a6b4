"""A run that stops and goes on is the run that never stopped, whatever else than trained weights has changed."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from samestep.building.loss import cross_entropy
from samestep.datasets import batches
from samestep.errors import UnprovenError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.runtime.checkpoints import checkpoint, manifests
from samestep.runtime.run import Run, parallelize
from samestep.state.fingerprints import digest
from tests.covering import daily
from tests.laboratory import traced_run
from tests.models import VOCABULARY, Tokens
from tests.parts import Words
from tests.plain import train_plainly
from tests.pool import pool

STEPS, CUT, WIDTH = 5, 2, 8

# -- models ----------------------------------------------------------------------------------------


class Net(Words):
    """An embedding, four blocks and a head; what changes besides the weights is in the blocks."""

    def __init__(self, *blocks: Callable[[], nn.Module]) -> None:
        super().__init__(*blocks * (4 // len(blocks)), width=WIDTH, entries=VOCABULARY)


class Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x)) * (1 + 0.1 * self.factor())

    def factor(self) -> Any:
        return 0.0


class Buffer(Linear):
    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1), persistent=persistent)

    def factor(self) -> Any:
        return self.count


class Attribute(Linear):
    """A count in an attribute of any kind."""

    def __init__(self, first: Callable[[], Any] = int) -> None:
        super().__init__()
        self.count = first()

    def factor(self) -> Any:
        return float(np.sum(list(self.count.values()) if isinstance(self.count, dict) else np.asarray(self.count)))


DEQUE = functools.partial(Attribute, lambda: collections.deque([0.0], maxlen=3))
TABLE = functools.partial(Attribute, lambda: {"steps": 0, (1, "b"): 0.5})
ARRAY = functools.partial(Attribute, lambda: np.zeros(2))


class TensorAttribute(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(2)

    def factor(self) -> Any:
        return self.count.sum()


class Own:
    """A value of the user's own class."""

    def __init__(self) -> None:
        self.count = 0


class OwnObject(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.own = Own()

    def factor(self) -> Any:
        return self.own.count


class Extra(OwnObject):
    """State in an object that only `get_extra_state` knows how to save."""

    def get_extra_state(self) -> Any:
        return {"count": self.own.count, "as a tensor": torch.tensor([self.own.count])}

    def set_extra_state(self, state: Any) -> None:
        assert int(state["as a tensor"]) == state["count"]
        self.own.count = state["count"]


class Teacher(nn.Module):
    """A frozen copy that follows a trained layer, as in BYOL, DINO and MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(WIDTH, WIDTH)
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.student(x)) + 0.5 * self.teacher(x)


# -- what the user's loop does after a step ---------------------------------------------------------


def nothing(run: Run) -> None:
    """The loop leaves the model alone."""


@torch.no_grad()
def follow(run: Run) -> None:
    for module in run.model.modules():
        if isinstance(module, Teacher):
            for one, other in zip(module.teacher.parameters(), module.student.parameters(), strict=True):
                one.lerp_(other, 0.5)


@torch.no_grad()
def follow_by_data(run: Run) -> None:
    for module in run.model.modules():
        if isinstance(module, Teacher):
            for one, other in zip(module.teacher.parameters(), module.student.parameters(), strict=True):
                one.data = one.data * 0.5 + other.data * 0.5


@torch.no_grad()
def raise_counts(run: Run) -> None:
    for module in run.model.modules():
        if isinstance(module, Buffer | TensorAttribute):
            module.count += 1
        elif isinstance(module, OwnObject):
            module.own.count += 1
        elif isinstance(module, Attribute) and isinstance(module.count, collections.deque):
            module.count.append(module.count[-1] + 1)
        elif isinstance(module, Attribute) and isinstance(module.count, dict):
            module.count["steps"] += 1
        elif isinstance(module, Attribute):
            module.count = module.count + 1


# -- optimizers ------------------------------------------------------------------------------------


class ScheduleFree(Optimizer):
    """Its groups count steps and sum weights, as in schedule-free SGD (Defazio et al., 2024)."""

    def __init__(self, params: Any, lr: float = 0.3) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0, "seen": []})
        self.largest = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["k"] ** 2
            group["seen"] = [*group["seen"][-1:], group["k"]]
            self.largest = max(self.largest, group["weight_sum"])
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"] * group["k"] ** 2 / (group["weight_sum"] + sum(group["seen"])))
                param.mul_(1 - 1e-3 * self.largest)


class WithTensors(Optimizer):
    """A tensor in each group, and an attribute that is a tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "d": torch.ones((), dtype=torch.float64)})
        self.trail = torch.zeros(3, dtype=torch.float64)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.trail = self.trail.roll(1) + 1
        for group in self.param_groups:
            group["d"] = group["d"] * 1.5
            for param in group["params"]:
                param.sub_(param.grad, alpha=float(group["lr"] * group["d"] / self.trail.sum()))


class WithObject(Optimizer):
    """An option of the user's own class that changes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "own": Own()})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["own"].count += 1
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"] / group["own"].count)


def sgd(named: list[tuple[str, Tensor]]) -> Optimizer:
    return torch.optim.SGD([tensor for _, tensor in named], lr=0.3, momentum=0.9)


def schedule_free(named: list[tuple[str, Tensor]]) -> Optimizer:
    first = [tensor for name, tensor in named if name.endswith("weight")]
    rest = [tensor for name, tensor in named if not name.endswith("weight")]
    return ScheduleFree([{"params": first}, {"params": rest, "lr": 0.05}])


# -- cases -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    after: Callable[[Run], None] = nothing
    optimizer: Callable[[list[tuple[str, Tensor]]], Optimizer] = sgd
    layouts: tuple[str, str] = ("dp=2", "dp=1 pp=2 microbatch=8")
    """The layout that is stopped and resumed, and the one in which it is resumed too."""
    is_refused: bool = False


def _of(*blocks: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Net(*blocks)


CASES = {
    "sgd": Case(_of(Linear)),
    "schedule-free": Case(_of(Linear), optimizer=schedule_free),
    "schedule-free, stages": Case(
        _of(Linear), optimizer=schedule_free, layouts=("dp=1 pp=2 microbatch=8", "dp=2 zero=3")
    ),
    "tensors in groups": Case(
        _of(Linear),
        optimizer=lambda named: WithTensors([tensor for _, tensor in named]),
        layouts=("dp=2 zero=1", "dp=2 zero=2"),
    ),
    "teacher": Case(_of(Teacher), follow, layouts=("dp=2", "dp=2 zero=3")),
    "teacher by .data": Case(_of(Teacher), follow_by_data),
    "teacher, sharded": Case(_of(Teacher), follow, layouts=("dp=2 zero=3", "dp=2 zero=1")),
    "buffers": Case(
        _of(Buffer, lambda: Buffer(False)), raise_counts, layouts=("dp=1 pp=2 microbatch=8", "dp=2 zero=3")
    ),
    "attributes": Case(_of(Attribute, DEQUE, TABLE, ARRAY), raise_counts),
    "attributes of stages": Case(
        _of(Extra, TensorAttribute, Attribute, DEQUE), raise_counts, layouts=("dp=1 pp=2 microbatch=8", "dp=2 zero=2")
    ),
    "own object": Case(_of(OwnObject), raise_counts, is_refused=True),
    "option of its own class": Case(
        _of(Linear), optimizer=lambda named: WithObject([tensor for _, tensor in named]), is_refused=True
    ),
}


def _prepared(rank: int, world: int, name: str, layout: str, allow: tuple[str, ...] = ()) -> Run:
    case = CASES[name]
    train, numerics = {"global_batch": 8, "steps": STEPS, "seed": 3}, {"precision": "float64"}
    job = Job(train=train, numerics=numerics, run={"allow": list(allow)})
    source = Source(case.build, cross_entropy, case.optimizer, name)
    run = traced_run((name, "resumed"), source, Tokens(), layout, job, rank, world)
    run.prepare(next(batches(Tokens(), job)).samples([0]))
    return run


def steps(rank: int, world: int, name: str, layout: str, begin: str, until: int, end: str, allow: Any = ()) -> Any:
    """Resume from `begin`, take the steps up to `until`, save to `end`; return the losses."""
    run, losses = _prepared(rank, world, name, layout, allow), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if begin:
            checkpoint.load(run, manifests.list_checkpoints(Path(begin))[-1])
        for batch in batches(Tokens(), run.job, first_step=run.steps_taken):
            if batch.step >= until:
                break
            losses.append(run.step(batch).loss)
            CASES[name].after(run)
        if end:
            checkpoint.save(run, Path(end), keep=1)
    return losses


@pytest.fixture(scope="module")
def _traced(request):
    """Trace the models of the tests that run before the first rank is forked."""
    for item in request.session.items:
        if item.path == request.path and "_traced" in item.fixturenames:
            _prepared(0, 1, item.callspec.params["name"], "dp=1")


@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize("name", [name for name in CASES if name != "sgd"])
def test_a_resumed_run_is_the_one_that_never_stopped(name, tmp_path):
    case, folder = CASES[name], str(tmp_path / "cut")
    same, other = case.layouts
    whole = pool(2).run(steps, name, same, "", STEPS, "")
    before = pool(2).run(steps, name, same, "", CUT, folder)
    if case.is_refused:
        with pytest.raises(UnprovenError, match=r"does not hold (own|count) \(a Own\), which has changed.*\"resume\""):
            pool(2).run(steps, name, same, folder, STEPS, "")
        pool(2).run(steps, name, same, folder, STEPS, "", ("resume",))
        return
    after = pool(2).run(steps, name, same, folder, STEPS, "")
    assert [one + two for one, two in zip(before, after, strict=True)] == whole
    elsewhere = pool(2).run(steps, name, other, folder, STEPS, "")
    for losses in elsewhere:
        assert losses == pytest.approx(whole[0][CUT:], rel=1e-9)


def test_a_checkpoint_without_these_records_is_read(tmp_path):
    run = _prepared(0, 1, "sgd", "dp=1")
    folder = checkpoint.save(run, tmp_path, keep=1)
    manifest = manifests.read_manifest(folder)
    for key in ("ranks", "frozen", "nominal_count"):
        del manifest[key]
    (folder / "manifest.json").unlink()
    manifests.write_manifest(folder, manifest)
    checkpoint.load(_prepared(0, 1, "sgd", "dp=1"), folder)


def test_a_partial_function_that_was_looked_at_has_not_changed():
    activation = functools.partial(torch.nn.functional.gelu, approximate="tanh")  # of Gemma and GPT-BigCode
    before = digest(activation)
    assert vars(activation) == {}
    assert digest(activation) == before
    assert digest(functools.partial(torch.nn.functional.gelu, approximate="none")) != before


def test_what_cannot_be_kept_is_named_when_it_is_saved(tmp_path):
    run = _prepared(0, 1, "own object", "dp=1")
    raise_counts(run)
    with pytest.warns(UserWarning, match=r"does not hold own \(a Own\), which has changed, of attributes of blocks\.0"):
        checkpoint.save(run, tmp_path, keep=1)


# -- rates that a loop or a scheduler sets ---------------------------------------------------------


class ByHand:
    """A loop's own schedule, which goes on from what the groups hold."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for index, group in enumerate(self.optimizer.param_groups):
            group["lr"] = group["lr"] * (0.7 + 0.1 * index)
            group["momentum"] = group["momentum"] * 0.9

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _falling_late(optimizer: Optimizer) -> Any:
    rising, falling = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2), lr_scheduler.CosineAnnealingLR(optimizer, 6)
    return lr_scheduler.SequentialLR(optimizer, [rising, falling], [2])


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "rate and momentum": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=8),
    "several": _falling_late,
    "by hand": ByHand,
}
ORDERS = "before", "after", "prepared before", "run's before", "run's after", "tensor run's before", "list before"
"""Whether the schedule is made before the load or after it, over the given optimizer or the run's, with a rate that is a number or a tensor."""
OF_RATES = [torch.randn(8, 8, generator=torch.Generator().manual_seed(at)) for at in range(7)]
PARTS = (0, 3), (3, 4), (4, 7)
LABELS = torch.arange(8) % 4


def _with_rates(order: str) -> tuple[nn.Module, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
    rates = [torch.tensor(rate) if "tensor" in order else rate for rate in (0.3, 0.1)]
    groups = [{"params": [model.weight], "lr": rates[0]}, {"params": [model.bias], "lr": rates[1]}]
    return model, torch.optim.SGD(groups, lr=rates[0], momentum=0.9)


def _plain_rates(schedule: str, order: str) -> list[tuple[float, float]]:
    """Return the loss and the rate of each step of a plain loop that is resumed twice."""
    taken, stored = [], None
    for first, last in PARTS:
        model, optimizer = _with_rates(order)
        scheduler = None if "after" in order else SCHEDULES[schedule](optimizer)
        if stored:
            model.load_state_dict(stored[0])
            optimizer.load_state_dict(stored[1])
        scheduler = scheduler or SCHEDULES[schedule](optimizer)
        if stored:
            scheduler.load_state_dict(stored[2])
        for values in OF_RATES[first:last]:
            loss = nn.functional.cross_entropy(model(values), LABELS)
            taken.append((loss.item(), float(optimizer.param_groups[0]["lr"])))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        stored = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    return taken


def _rates(rank: int, world: int, schedule: str, order: str, layout: str, folder: Path) -> list[tuple[float, float]]:
    """Return the same of a run, which begins anew and loads what it has saved."""
    taken, stored = [], None
    for first, last in PARTS:
        model, optimizer = _with_rates(order)
        given = [optimizer] if "list" in order else optimizer
        run = parallelize(model, "cross_entropy", given, layout=layout, job=Job(train={"global_batch": 8}))
        if "prepared" in order or "run's" in order:
            run.prepare((OF_RATES[0], LABELS))
        followed = run.updater.optimizer if "run's" in order else optimizer
        scheduler = None if "after" in order else SCHEDULES[schedule](followed)
        if stored is not None:
            run.load(folder)
        scheduler = scheduler or SCHEDULES[schedule](followed)
        if stored is not None:
            scheduler.load_state_dict(stored)
        for values in OF_RATES[first:last]:
            report = run.step((values, LABELS))
            taken.append((report.loss, report.lr))
            scheduler.step()
        run.save(folder)
        stored = scheduler.state_dict()
    return taken


@pytest.mark.parametrize(("schedule", "order"), daily(itertools.product(SCHEDULES, ORDERS)))
def test_rates_that_were_set_from_outside_are_those_of_torch_after_a_resume(schedule, order, tmp_path):
    expected = _plain_rates(schedule, order)
    for step, (plain, ours) in enumerate(zip(expected, _rates(0, 1, schedule, order, "", tmp_path), strict=True)):
        assert ours == pytest.approx(plain, rel=1e-5), step


def test_rates_set_from_outside_are_kept_where_states_are_divided(tmp_path):
    expected = _plain_rates("by hand", "before")
    for taken in pool(2).run(_rates, "by hand", "before", "dp=2 zero=1", tmp_path):
        assert taken == [pytest.approx(plain, rel=1e-5) for plain in expected]


def test_a_rate_that_the_loop_sets_behind_the_load_wins(tmp_path):
    def begun() -> tuple[Run, Optimizer]:
        model, optimizer = _with_rates("")
        return parallelize(model, "cross_entropy", optimizer, job=Job(train={"global_batch": 8})), optimizer

    run, optimizer = begun()
    for rate in (0.3, 0.2):
        optimizer.param_groups[0]["lr"] = rate
        run.step((OF_RATES[0], LABELS))
    run.save(tmp_path)
    run, optimizer = begun()
    run.load(tmp_path)
    assert optimizer.param_groups[0]["lr"] == 0.2
    optimizer.param_groups[0]["lr"] = 0.07
    assert run.step((OF_RATES[0], LABELS)).lr == 0.07


FROZEN = {
    "a weight from the second step on": ("weight", lambda step: step < 1),
    "a weight between two steps": ("weight", lambda step: not 1 <= step < 5),
    "a weight before the resume and no longer": ("weight", lambda step: not 1 <= step < 3),
}
"""The weights that a loop freezes, and the steps in which it trains them; a run is resumed before the third and fourth."""


def _frozen(rank: int, world: int, name: str, layout: str, folder: Path) -> list[float]:
    """Return the losses of a loop that sets, before each step, which weight is trained."""
    of_model, is_trained = FROZEN[name]
    losses = []
    for first, last in PARTS:
        model, optimizer = _with_rates("")
        run = parallelize(model, "cross_entropy", optimizer, layout=layout, job=Job(train={"global_batch": 8}))
        if first:
            run.load(folder)
        for step in range(first, last):
            model.get_parameter(of_model).requires_grad_(is_trained(step))
            losses.append(run.step((OF_RATES[step], LABELS)).loss)
        run.save(folder)
    return losses


@pytest.mark.parametrize(
    ("name", "layout"), [*((name, "") for name in [*FROZEN][::2]), ("a weight between two steps", "dp=2 zero=3")]
)
def test_a_loop_that_freezes_weights_is_that_of_torch_after_a_resume(name, layout, tmp_path):
    model, optimizer = _with_rates("")

    def of_step(step: int) -> Tensor:
        model.get_parameter(FROZEN[name][0]).requires_grad_(FROZEN[name][1](step))
        return nn.functional.cross_entropy(model(OF_RATES[step]), LABELS)

    plain, _ = train_plainly(model, range(7), of_step, optimizer)
    args = name, layout, tmp_path
    for losses in pool(2).run(_frozen, *args) if layout else [_frozen(0, 1, *args)]:
        assert losses == pytest.approx(plain, rel=1e-5)
