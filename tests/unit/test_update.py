"""The optimizer's side of a step: pieces get the update of whole weights, or the layout is refused; norm, clip, scale."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.building.loss import loss_of
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.errors import LayoutError, ModelError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.job_tables import NumericsTable
from samestep.layout import Layout
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import Cut, ParamSpec
from samestep.models.spec import ModelSpec
from samestep.program.step import StepSpec
from samestep.program.update_rules import UPDATED_WHOLE
from samestep.runtime.optimizers import update_rule
from samestep.runtime.optimizers.optimizer_source import (
    OptimizerSource,
    WholeWeights,
    check_optimizer,
    optimizer_source,
)
from samestep.runtime.optimizers.optimizer_step import LossScale, Piece, Updater, clip_factor
from samestep.runtime.optimizers.whole_optimizer import WholeOptimizer, members_that_evaluate
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.runtime.weights.flat_buffers import squared_norm
from samestep.strategies import whole_update
from tests.laboratory import Runs, job_of, largest_error, perturbed, whole
from tests.models import MODELS, Tokens
from tests.pool import pool

Update = Callable[[Tensor, Tensor, dict[str, Any]], Tensor]


class Custom(Optimizer):
    """An optimizer of a user's own: `weight -= lr * update(weight, gradient, state)`."""

    def __init__(self, params: Any, update: Update, lr: float = 0.1) -> None:
        super().__init__(params, {"update": update, "lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param -= group["lr"] * group["update"](param, param.grad, self.state[param])


def momentum(gradient: Tensor, state: dict[str, Any], beta: float = 0.9) -> Tensor:
    state["mean"] = state.get("mean", torch.zeros_like(gradient)).lerp(gradient, 1 - beta)
    return state["mean"]


def lion(_: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    before = state.get("mean", torch.zeros_like(gradient))
    state["mean"] = before.lerp(gradient, 0.01)
    return before.lerp(gradient, 0.1).sign()


def lars(weight: Tensor, gradient: Tensor, _: dict[str, Any]) -> Tensor:
    return gradient * weight.norm() / (gradient.norm() + 1e-9)


def stable_adam(_: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    """Adam whose step is cut where the root mean square of a whole tensor's update is above 1."""
    state["square"] = state.get("square", torch.zeros_like(gradient)).lerp(gradient.square(), 0.5)
    scale = (gradient.square() / state["square"].clamp(min=1e-30)).mean().sqrt().clamp(min=1.0)
    return momentum(gradient, state) / (state["square"].sqrt() + 1e-8) / scale


def clipped(limit: float) -> Update:
    return lambda _, gradient, state: gradient * min(1.0, limit / (float(gradient.norm()) + 1e-12))


def centred(_: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    return gradient - gradient.mean(-1, keepdim=True)


def noisy(_: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    return gradient + torch.randn_like(gradient)


class ClippedTogether(Custom):
    """Clips by the norm over all parameters it is given."""

    def step(self, closure: None = None) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


def custom(update: Update, kind: type[Custom] = Custom) -> OptimizerSource:
    return optimizer_source(lambda params: kind(params, update))


def by_dimensions(params: list[Tensor]) -> Optimizer:
    """The usual idiom: matrices are decayed, vectors are not."""
    return torch.optim.AdamW(
        [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.5},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
    )


def by_position(params: list[Tensor]) -> Optimizer:
    return torch.optim.SGD([{"params": params[:1], "lr": 0.5}, {"params": params[1:]}], lr=0.1)


def model_of(*shapes: tuple[int, ...]) -> ModelSpec:
    params = tuple(ParamSpec(name=f"weight{i}", shape=shape, layer=0) for i, shape in enumerate(shapes))
    return ModelSpec(name="model", layers=(LayerSpec(name="all", modules=("",)),), params=params)


MODEL = model_of((61, 10), (10,), (), (12, 10), (4, 3, 3), (1, 7))
CUT_MODEL = replace(
    MODEL, params=tuple(replace(p, cut=Cut(style="column", dim=0, groups=1)) for p in MODEL.params if p.shape)
)
MATRICES = model_of((8, 5), (6, 6), (5, 3))

ELEMENTWISE: dict[str, dict[str, Any]] = {
    "adam": {},
    "adamw": {"weight_decay": 0.1, "no_weight_decay": ("*norm*", "*bias", "weight1")},
    "sgd": {"weight_decay": 0.1, "options": {"momentum": 0.9, "nesterov": True}},
    "adagrad": {},
    "rmsprop": {"options": {"momentum": 0.5, "centered": True}},
    "nadam": {},
    "radam": {},
    "adamax": {},
    "rprop": {},
    "asgd": {"options": {"t0": 1.0}},
    "adadelta": {"lr": 1.0},
}


def under(zero: int) -> Layout:
    return Layout(f"dp=2 zero={zero}")


def elementwise_job(name: str) -> Job:
    return Job(
        train={"global_batch": 8, "steps": 3},
        numerics={"precision": "float64"},
        optimizer={"name": name, "lr": 0.01, **ELEMENTWISE[name]},
    )


# -- which optimizers may be cut -----------------------------------------------------------------------------------------


def updated_whole(source: OptimizerSource, model: ModelSpec, layout: Layout) -> list[str]:
    """Return the weights that the layout divides and the rule needs whole."""
    return [param.name for param in check_optimizer(source, model, layout).params if param.is_updated_whole]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param(optimizer_of(Job(optimizer={"name": "adafactor"})), [0, 1, 3, 4, 5], id="adafactor"),
        pytest.param(custom(stable_adam), [0, 1, 3, 4, 5], id="stable adam"),
        pytest.param(custom(clipped(1e4)), [0, 1, 3, 4, 5], id="clipped late"),
        pytest.param(custom(centred), [0, 1, 3, 4, 5], id="by rows"),
        pytest.param(optimizer_source(by_dimensions), [], id="by dimensions"),
        pytest.param(optimizer_source(by_position), [], id="by position"),
    ],
)
def test_rules_that_couple_elements_are_updated_whole(source: OptimizerSource, expected: list[int]) -> None:
    names = [f"weight{index}" for index in expected]
    assert updated_whole(source, MODEL, under(0)) == []
    for zero in (1, 2, 3):
        assert updated_whole(source, MODEL, under(zero)) == names
    assert updated_whole(source, MODEL, Layout(pp=2)) == []
    assert updated_whole(source, MODEL, Layout(zero=3)) == []  # over a single rank nothing is cut
    assert updated_whole(source, CUT_MODEL, Layout("tp=2 dp=2 zero=0")) == names[:4]  # one row is not cut


def test_rules_that_couple_weights_are_refused_where_these_are_spread() -> None:
    clipping = custom(lambda _, gradient, state: gradient, ClippedTogether)
    assert updated_whole(clipping, MODEL, under(0)) == []
    for layout, words in ((under(1), "cut by zero=1"), (under(3), "cut by zero=3"), (Layout(pp=2), "spread by pp=2")):
        with pytest.raises(LayoutError, match=rf"every weight separately .*, so weights {words} would .*Use .*=[01]$"):
            check_optimizer(clipping, MODEL, layout)


def test_a_rule_that_draws_is_refused_on_several_ranks() -> None:
    check_optimizer(custom(noisy), MODEL, Layout())
    for layout in (under(0), under(1), Layout(pp=2)):
        with pytest.raises(LayoutError, match=r"^Custom draws random numbers \(randn_like\), .*. Use one rank$"):
            check_optimizer(custom(noisy), MODEL, layout)


@pytest.mark.parametrize("name", [*ELEMENTWISE, "adafactor", "muon"])
def test_what_is_known_of_torchs_own_rules_is_what_a_trial_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their classes are known without a trial; a subclass, whose step may be another, is tried."""
    job = elementwise_job(name) if name in ELEMENTWISE else Job(optimizer={"name": name, "weight_decay": 0.0})
    source, model = optimizer_of(job), MATRICES if name == "muon" else model_of((61, 10), (10,), ())
    assert update_rule.is_torchs_own(source([("weight", nn.Parameter(torch.zeros(2, 2)))]))
    known = updated_whole(source, model, under(1))
    monkeypatch.setattr(update_rule, "is_torchs_own", lambda _: False)
    assert updated_whole(source, model, under(1)) == known
    assert bool(known) == (name not in ELEMENTWISE) == (name in UPDATED_WHOLE)


def test_experts_that_tp_cuts_too_come_to_no_one_owner() -> None:
    experts = replace(
        model_of((4, 8, 6)),
        params=(
            replace(model_of((4, 8, 6)).params[0], name="experts", cut=Cut(style="column", dim=1, groups=8), experts=4),
        ),
    )
    job = Job(optimizer={"groups": [{"match": ["experts"], "name": "adafactor"}]})
    for text, is_refused in {"dp=2 tp=2 ep=2": True, "dp=2 tp=2": False, "dp=2 ep=2": False}.items():
        reason = whole_update.refusal(StepSpec.of(experts, job, Layout(text)))
        assert bool(reason) == is_refused
        assert not reason or str(reason).endswith("tp=2 and ep=2 both cut it. Use tp=1, or ep=1")


def test_what_is_changed_in_an_optimizer_of_torch_is_tried() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    hooked, patched, scheduled = (torch.optim.SGD([weight], lr=0.1) for _ in range(3))
    hooked.register_step_pre_hook(lambda *_: None)
    patched.step = types.MethodType(Custom.step, patched)  # type: ignore[method-assign]
    torch.optim.lr_scheduler.ConstantLR(scheduled)
    assert [update_rule.is_torchs_own(one) for one in (hooked, patched, scheduled)] == [False, False, True]


# -- rules that change their kind later ------------------------------------------------------------------------------------

LATE = 777
TICKS = 0


def is_beyond(count: int) -> bool:
    return count > LATE


def warmth(count: int, full: int = 300) -> float:
    return min(1.0, count / full)


def ticking(last: int) -> Callable[[], bool]:
    count = 0

    def is_late() -> bool:
        nonlocal count
        count += 1
        return count > last * 8

    return is_late


@dataclass
class Settings:
    start: int = 4500
    seen: int = 0

    def is_late(self) -> bool:
        self.seen += 1
        return self.seen > self.start


def as_method(settings: Settings) -> Callable[[int], bool]:
    return lambda _: settings.is_late()


def ticks() -> bool:
    global TICKS
    TICKS += 1
    return TICKS > 900


class Changing(Optimizer):
    """Descends along the gradient, and along its direction once `is_late` says so."""

    def __init__(self, params: Any, is_late: Callable[[int], bool]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.count, self.is_late = 0, is_late

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    late = self.is_late(self.count)
                    param.sub_(param.grad / param.grad.norm() if late else param.grad, alpha=group["lr"])


KEPT_OUTSIDE = ticking(60)
CHANGES: dict[str, Callable[[], Callable[[int], bool]]] = {
    "a variable that a helper reads": lambda: is_beyond,
    "a default value of a helper": lambda: lambda count: warmth(count) >= 1.0,
    "a counter in a closure, for each weight": lambda: lambda _: KEPT_OUTSIDE(),
    "an object's attributes": lambda: as_method(Settings()),
    "a global counter": lambda: lambda _: ticks(),
    "a product of constants": lambda: lambda count, total=3000: count > 0.06 * total,
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_rule_that_changes_later_is_seen_wherever_its_threshold_stands(kind: str) -> None:
    source = optimizer_source(lambda params: Changing(params, CHANGES[kind]()))
    assert updated_whole(source, model_of((12, 10)), under(1)) == ["weight0"]
    assert TICKS == 0
    assert KEPT_OUTSIDE.__closure__[0].cell_contents == 0  # type: ignore[index]  # the trial's steps leave nothing behind


def in_blocks(_: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    """As with 8-bit states: blocks of 256 elements share a scale, from 4,096 elements on."""
    if gradient.numel() < 4096:
        return gradient
    flat = nn.functional.pad(gradient.flatten(), (0, -gradient.numel() % 256)).view(-1, 256)
    scale = flat.abs().amax(1, keepdim=True) / 127
    return ((flat / scale).round() * scale).flatten()[: gradient.numel()].view_as(gradient)


def by_columns_if_large(_: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    return gradient / gradient.norm(dim=0) if gradient.ndim == 2 and min(gradient.shape) > 300 else gradient


def in_some_steps(every: int) -> Update:
    def update(_: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        return gradient.cumsum(0) if state["step"] % every == 0 else gradient

    return update


def only_when(beyond: float) -> Update:
    """Divides by the norm once it is beyond what a trial meets."""
    return lambda _, gradient, state: torch.where(gradient.norm() > beyond, gradient / gradient.norm(), gradient)


def of_tensor_counts(_: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    """Reads numbers, of counts alone."""
    state["step"] = state.get("step", torch.zeros(())) + 1
    return gradient / float(1 - 0.9 ** state["step"]) if state["step"] > 3 else gradient


def of_float32(_: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
    return state.setdefault("mean", torch.zeros(gradient.shape)).lerp_(gradient, 0.5)


LARGE = model_of((2048, 640), (2048, 640), (100_000,))
TRIALS: dict[str, tuple[Update, list[int]]] = {
    "blocks of elements": (in_blocks, [0, 1, 2]),
    "columns of what is large": (by_columns_if_large, [0, 1]),
    "every 64th step": (in_some_steps(64), [0, 1, 2]),
    "a norm that does not act yet": (only_when(1e12), [0, 1, 2]),
    "counts that are tensors": (of_tensor_counts, []),
    "states in float32": (of_float32, []),
}


@pytest.mark.parametrize("name", TRIALS)
def test_a_trial_shows_which_weights_are_updated_whole(name: str) -> None:
    update, expected = TRIALS[name]
    assert updated_whole(custom(update), LARGE, under(1)) == [f"weight{index}" for index in expected]


def test_a_rule_whose_rate_is_still_zero_is_tried() -> None:
    source = optimizer_source(lambda params: Custom(params, lars, lr=0.0))
    assert updated_whole(source, MATRICES, under(1)) == ["weight0", "weight1", "weight2"]


class ByDistance(Custom):
    """As D-Adaptation and Prodigy: a rate from how far all weights have come."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        group = self.param_groups[0]
        for param in group["params"]:
            first = self.state[param].setdefault("first", param.clone())
            group["far"] = max(group.get("far", 1e-6), float((first - param).norm()))
        for param in group["params"]:
            param.sub_(param.grad.sign(), alpha=group["far"])


def test_a_rate_from_all_weights_is_refused_where_these_are_spread() -> None:
    source = custom(lambda _, gradient, state: gradient, ByDistance)
    check_optimizer(source, MATRICES, under(0))
    for layout in (under(1), Layout(pp=2)):
        with pytest.raises(LayoutError, match=r"updated otherwise without the others.*Use .*=[01]$"):
            check_optimizer(source, MATRICES, layout)


def test_a_rule_that_never_changes_stays_one_by_elements() -> None:
    source = optimizer_source(lambda params: Changing(params, lambda count: count > 10**9))
    assert updated_whole(source, model_of((12, 10)), under(1)) == []


class ByPosition(Optimizer):
    """Descends less along weights that stand later in their group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for index, param in enumerate(group["params"]):
                param.sub_(param.grad / (1 + index), alpha=group["lr"])


class AllAtOnce(ByPosition):
    """Descends along all weights of a group in one call."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            torch._foreach_add_(group["params"], [param.grad for param in group["params"]], alpha=-group["lr"])


class ByCalls(ByPosition):
    """Descends less along each weight than along the one before, in this step and all before."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.calls += 1
                param.sub_(param.grad / self.calls, alpha=group["lr"])


@pytest.mark.parametrize("kind", [ByPosition, ByCalls])
def test_a_rule_that_counts_weights_is_refused_where_a_rank_has_some_of_them(kind: Any) -> None:
    with pytest.raises(LayoutError, match=r"updated otherwise without the others.*Use .*zero=0"):
        check_optimizer(optimizer_source(kind), MODEL, under(1))


def test_a_rule_for_all_weights_at_once_may_have_some_of_them() -> None:
    check_optimizer(optimizer_source(AllAtOnce), MODEL, under(1))


def test_one_group_of_many_can_need_whole_weights() -> None:
    """A muon for some weights, Adam for the others, in one class: the group of the first weight tells nothing."""
    weights = {param.name: nn.Parameter(torch.zeros(param.shape)) for param in MODEL.params}
    groups = [
        {"params": [weight for name, weight in weights.items() if name != "weight3"], "update": lion},
        {"params": [weights["weight3"]], "update": lars},
    ]
    source = optimizer_source(Custom(groups, update=lion), {id(weight): name for name, weight in weights.items()})
    assert updated_whole(source, MODEL, under(3)) == ["weight3"]


def test_what_evaluates_the_loss_again_is_refused_where_a_rank_lacks_weights() -> None:
    source = optimizer_source(lambda params: torch.optim.LBFGS(params))
    evaluating = members_that_evaluate(source, WholeWeights.of(MATRICES, {}))
    assert evaluating == {0}
    for zero in (1, 2, 3):
        with pytest.raises(
            LayoutError, match=r"^the step of LBFGS evaluates the loss again.*Use .*zero=0 without tp and pp$"
        ):
            check_optimizer(source, MATRICES, under(zero), evaluating=evaluating)
    adam = optimizer_source(lambda params: torch.optim.Adam(params))
    assert not members_that_evaluate(adam, WholeWeights.of(MATRICES, {}))


def test_a_wrong_setting_is_told_by_its_owner() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        check_optimizer(optimizer_source(lambda params: torch.optim.Adam(params, lr=-1)), MODEL, under(2))


# -- instances -------------------------------------------------------------------------------------------------------------


def instance(**options: Any) -> tuple[nn.Module, Optimizer, dict[int, str]]:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    groups = [
        {"params": model[1].parameters(), "lr": 0.5, "weight_decay": 0.1},
        {"params": [model[2].bias], "betas": (0.5, 0.6)},
        {"params": [model[2].weight]},
    ]
    return model, torch.optim.AdamW(groups, lr=0.25, **options), {id(p): name for name, p in model.named_parameters()}


def test_an_instance_is_rebuilt_by_name_and_group() -> None:
    _, optimizer, names = instance(eps=1e-3, amsgrad=True)
    pieces = [(name, nn.Parameter(torch.zeros(2))) for name in ("2.weight", "1.bias", "1.weight")]
    built = optimizer_source(optimizer, names)(pieces)
    assert [[id(p) for p in group["params"]] for group in built.param_groups] == [
        [id(pieces[1][1]), id(pieces[2][1])],
        [],
        [id(pieces[0][1])],
    ]
    found = [
        {key: group[key] for key in ("lr", "weight_decay", "betas", "eps", "amsgrad")} for group in built.param_groups
    ]
    plain = {"lr": 0.25, "weight_decay": 0.01, "betas": (0.9, 0.999), "eps": 1e-3, "amsgrad": True}
    assert found == [{**plain, "lr": 0.5, "weight_decay": 0.1}, {**plain, "betas": (0.5, 0.6)}, plain]


def test_an_instance_may_leave_weights_out() -> None:
    """The embedding, first of all weights, is not its to update; a rank that has nothing else has nothing to do."""
    _, optimizer, names = instance()
    source = optimizer_source(optimizer, names)
    spec = ModelSpec(
        name="model",
        layers=(LayerSpec(name="all", modules=("",)),),
        params=tuple(ParamSpec(name=n, shape=(4, 4), layer=0) for n in ("0.weight", "1.weight", "2.bias", "2.weight")),
    )
    for zero in (1, 2, 3):
        check_optimizer(source, spec, under(zero))
    weight = torch.ones(3)
    updater = Updater.over(
        [Piece("0.weight", 0, 3, weight, lambda: torch.ones(3))], WholeOptimizer(source), NumericsTable()
    )
    updater.step(1.0)
    assert torch.equal(weight, torch.ones(3))


def test_an_instance_that_has_stepped_or_is_not_the_models_is_refused() -> None:
    model, optimizer, names = instance()
    with pytest.raises(ModelError, match="holds a parameter of shape \\(4, 4\\) that is not the model's"):
        optimizer_source(optimizer, {})
    with pytest.raises(ModelError, match="not the model's"):
        optimizer_source(optimizer)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    with pytest.raises(ModelError, match="the optimizer has stepped already"):
        optimizer_source(optimizer, names)


def test_an_instance_that_forgets_an_argument_is_refused() -> None:
    class Forgetful(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 0.1, warmth: float = 2.0) -> None:
            super().__init__(params, lr * warmth)

    model = nn.Linear(2, 2)
    names = {id(p): name for name, p in model.named_parameters()}
    with pytest.raises(ModelError, match=r"Forgetful does not keep its argument warmth in `defaults`.*give a function"):
        optimizer_source(Forgetful(model.parameters()), names)


def test_torch_optimizers_can_all_be_rebuilt() -> None:
    model = nn.Linear(2, 2)
    names = {id(param): name for name, param in model.named_parameters()}
    for name in ELEMENTWISE:
        kind = type(optimizer_of(elementwise_job(name))(list(model.named_parameters())))
        built = optimizer_source(kind(model.parameters(), lr=0.125), names)(list(model.named_parameters()))
        assert [group["lr"] for group in built.param_groups] == [0.125], name


# -- the same update in every layout -----------------------------------------------------------------------------------------


def injected(rank: int, world: int, layout: str, names: list[str]) -> dict[str, Runs]:
    """Feed equal gradients into each optimizer over the pieces of a layout, three steps; return weights and states."""
    job = job_of("float64")
    place = RankInfo(rank=rank, local_rank=rank, world_size=world, ranks_per_node=world, device=torch.device("cpu"))
    run = Run(Source(perturbed(MODELS["plain"]), loss_of(job), optimizer_of(job)), Layout(layout), job, place)
    run.prepare(next(batches(Tokens(), job)).samples([0]))
    store = run.assembly.weights.store
    store.begin_step()
    sizes = {param.name: param.numel for param in run.program.step.model.params}
    first = [piece.value.detach().clone() for piece in store.pieces]
    found: dict[str, Runs] = {}
    for name in names:
        for piece, value in zip(store.pieces, first, strict=True):
            piece.value.detach().copy_(value)
        updater = Updater.over(store.pieces, WholeOptimizer(source_of(name)), job.numerics)
        for step in range(3):
            for piece in updater.pieces:
                generator = torch.Generator().manual_seed(100 * step + list(sizes).index(piece.name))
                gradient = torch.randn(sizes[piece.name], generator=generator, dtype=torch.float64)
                piece.gradient().copy_(gradient[piece.start : piece.stop].view_as(piece.gradient()))
            updater.rates.set(1.0 / (step + 1))
            updater.step(0.5)
            updater.live.publish()
            store.publish()
        found[name] = [
            (f"{piece.name}/{key}", piece.start, piece.stop, value.detach().clone())
            for piece in updater.pieces
            for key, value in {"value": piece.value, **updater.optimizer.state[piece.value]}.items()
            if isinstance(value, Tensor) and value.shape == piece.value.shape
        ]
        for piece in store.pieces:  # what stands in the module is what was updated
            assert piece.target is None or torch.equal(piece.target.flatten(), piece.value.detach().flatten())
    return found


def source_of(name: str) -> OptimizerSource:
    if name in ELEMENTWISE:
        return optimizer_of(elementwise_job(name))
    if name == "adafactor":
        return optimizer_of(Job(optimizer={"name": name, "lr": 0.01}))
    return custom(lion) if name == "lion" else optimizer_source(by_dimensions)


@functools.cache
def injected_alone() -> dict[str, Runs]:
    return injected(0, 1, "dp=1", [*ELEMENTWISE, "lion", "adafactor", "by dimensions"])


@pytest.mark.parametrize("layout", ["dp=2", "dp=2 zero=1 offload", "dp=2 zero=3"])
def test_equal_gradients_give_equal_weights_and_states(layout: str) -> None:
    names = [*ELEMENTWISE, "lion"]
    names += ["adafactor", "by dimensions"] if "zero" not in layout else ["by dimensions"] if "zero=3" in layout else []
    ranks = pool(2).run(injected, layout, names)
    for name in names:
        error, worst = largest_error(whole([found[name] for found in ranks]), whole([injected_alone()[name]]))
        assert error <= 1e-12, f"{name}: {worst}: {error:.1e}"


# -- norm, clip, scale ---------------------------------------------------------------------------------------------------------


def test_the_norm_does_not_depend_on_how_gradients_lie() -> None:
    """A float32 norm added up element by element is off by 1e-4 here, and by as much between two layouts."""
    values = torch.rand(6_000_000, generator=torch.Generator().manual_seed(1))
    expected = float(values.double().square().sum())
    device = values.device
    for parts in ([values], list(values.split(1_000_003)), list(values.split(5000)), [values.view(2000, -1).T]):
        assert float(squared_norm(parts, device)) == pytest.approx(expected, rel=1e-6)
    assert float(squared_norm([], device)) == 0.0
    assert float(squared_norm([torch.zeros(0)], device)) == 0.0
    assert float(squared_norm([torch.tensor(3.0), torch.ones(16)], device)) == pytest.approx(25.0)
    for bad in (math.inf, math.nan):
        values[4321] = bad
        assert not math.isfinite(float(squared_norm([values], device)))


@given(norm=st.floats(1e-6, 1e6), limit=st.floats(1e-3, 1e3))
def test_clipping_is_torchs_own(norm: float, limit: float) -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    weight.grad = torch.tensor([norm], dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([weight], limit)
    assert norm * clip_factor(norm, limit) == pytest.approx(float(weight.grad), rel=1e-12)
    assert clip_factor(norm, None) == 1.0


@given(
    first=st.sampled_from([0.5, 1.0, 8.0, 65536.0]),
    growth=st.integers(1, 4),
    overflows=st.lists(st.booleans(), max_size=40),
)
def test_the_loss_scale_halves_and_doubles(first: float, growth: int, overflows: list[bool]) -> None:
    scale, good = LossScale(first, growth), 0
    for overflowed in overflows:
        before = scale.scale
        scale.after(overflowed=overflowed)
        good = 0 if overflowed else good + 1
        if overflowed:
            assert scale.scale == (before / 2 if before > 1 else before)
        elif good == growth:
            assert scale.scale == before * 2
            good = 0
        else:
            assert scale.scale == before
    constant = LossScale()
    for overflowed in overflows:
        constant.after(overflowed=overflowed)
    assert (constant.scale, constant.is_dynamic) == (1.0, False)
