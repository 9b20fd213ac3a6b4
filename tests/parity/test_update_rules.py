"""Optimizers of any rule give one device's weights in every layout, or are refused by name before the first step.

The rules are those that people write: by elements, by whole matrices, by all weights at once; with hooks and tags of
parameters, weights that take no part, and learning rates that another hand sets.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.building.loss import loss_of
from samestep.building.model import call_model
from samestep.datasets import batches
from samestep.errors import LayoutError, ModelError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.checkpoints import checkpoint, manifests
from samestep.runtime.optimizers.optimizer_source import check_optimizer, optimizer_source
from samestep.runtime.run import Run
from tests.code.rows import entered
from tests.laboratory import (
    TOLERANCE,
    Code,
    Observed,
    assert_ledger,
    assert_same,
    follow,
    job_of,
    perturbed,
    prepared_run,
    prove,
    reference,
    run_from,
    source_of,
)
from tests.models import VOCABULARY, Tokens
from tests.parts import Residual, Words
from tests.plain import train_plainly, whole_batches
from tests.pool import pool


class Rule(Optimizer):
    """An optimizer of a user's own: `one` changes a weight that has a gradient."""

    def __init__(self, params: Any, lr: float = 0.02, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.one(param, group, self.state[param])

    def one(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError


class ScheduleFree(Rule):
    """The averages of Defazio et al. 2024, with a count that the groups keep."""

    def one(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["k"] = state.get("k", 0) + 1
        z = state.setdefault("z", param.detach().clone())
        z.sub_(param.grad, alpha=group["lr"])
        param.lerp_(z, 1 / state["k"])


class Lars(Rule):
    """As in MAE, MoCo v3, Barlow Twins: a trust ratio for what has two dimensions, none for norms and biases."""

    def one(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        ratio: Any = param.norm() / param.grad.norm() if param.ndim > 1 else 1.0
        param.add_(param.grad * ratio, alpha=-0.5 * group["lr"])


class LarsOfNumbers(Rule):
    """The same, with numbers that it looks at."""

    def one(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        size, slope = param.norm(), param.grad.norm()
        param.add_(
            param.grad, alpha=-0.5 * group["lr"] * float(size / slope) if size > 0 and slope > 0 else -group["lr"]
        )


class Late(Rule):
    """Elementwise for some steps (Shampoo's start_preconditioning_step)."""

    def __init__(self, params: Any, start: int = 2) -> None:
        super().__init__(params, start=start)

    def one(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        param.sub_(param.grad / (param.grad.norm() if state["step"] > group["start"] else 1.0), alpha=group["lr"])


class Shampoo(Rule):
    """Two-sided preconditioners, whose roots are taken every other step."""

    def __init__(self, params: Any, lr: float = 0.02, every: int = 2) -> None:
        super().__init__(params, lr=lr, every=every)

    def one(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if param.ndim != 2 or max(param.shape) > 64:
            param.sub_(param.grad, alpha=group["lr"])
            return
        state["step"] = state.get("step", 0) + 1
        left = state.setdefault("left", torch.eye(param.shape[0], dtype=param.dtype, device=param.device))
        left += param.grad @ param.grad.mT
        if state["step"] % group["every"] == 1:
            values, vectors = torch.linalg.eigh(left)
            state["root"] = vectors @ (values.clamp(min=1e-6) ** -0.5).diag() @ vectors.mT
        param.sub_(state["root"] @ param.grad, alpha=group["lr"])


class ByAllNorms(Rule):
    def step(self, closure: None = None) -> None:
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.sub_(param.grad / norm, alpha=group["lr"])


class ByAllNumbers(Rule):
    """Prodigy's and D-Adaptation's kind: a number that sums over all weights."""

    def step(self, closure: None = None) -> None:
        norm = sum(float(p.grad.norm()) for group in self.param_groups for p in group["params"])
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.sub_(param.grad / norm, alpha=group["lr"])


class Noisy(Rule):
    def one(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.sub_(param.grad + torch.randn_like(param), alpha=group["lr"])


def muon_beside_adam(params: list[Tensor]) -> Optimizer:
    return MuonAndAdam(params)


class MuonAndAdam(Rule):
    """As in modded-nanogpt: matrices are orthogonalised, the rest goes to Adam, in groups of one optimizer."""

    def __init__(self, params: list[Tensor]) -> None:
        # The bound is above the numbers that a trial takes for counts of steps: one of 64 has each rank try 64 steps, again and again.
        matrices = [param for param in params if param.ndim == 2 and param.numel() < 20_000]
        others = [param for param in params if all(param is not matrix for matrix in matrices)]
        super().__init__([{"params": matrices, "is_muon": True}, {"params": others, "is_muon": False}])

    def one(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        mean = state.setdefault("mean", torch.zeros_like(param)).lerp_(param.grad, 0.1)
        if not group["is_muon"]:
            square = state.setdefault("square", torch.zeros_like(param)).lerp_(param.grad.square(), 0.1)
            param.sub_(mean / (square.sqrt() + 1e-2), alpha=group["lr"])
            return
        x = mean / (mean.norm() + 1e-7)
        for _ in range(3):
            x = 1.5 * x - 0.5 * x @ x.mT @ x
        param.sub_(x, alpha=group["lr"] * max(1, param.shape[0] / param.shape[1]) ** 0.5)


class Wrapping(Optimizer):
    """Muon for matrices and AdamW for the rest, in a dictionary of optimizers with groups and states of their own."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        parts = {
            is_matrix: [param for param in params if (param.ndim == 2) is is_matrix] for is_matrix in (True, False)
        }
        kinds = {
            True: functools.partial(torch.optim.Muon, lr=0.02),
            False: functools.partial(torch.optim.AdamW, lr=0.01),
        }
        self.inner = {is_matrix: kinds[is_matrix](part) for is_matrix, part in parts.items() if part}
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for optimizer in self.inner.values():
            optimizer.step()


class Batched(Rule):
    """As in nanochat: groups by kind and shape, one of a single matrix, and code that takes no empty one; momenta of all matrices of a shape are stacked, in the state of the
    first, and the matrices are orthogonalised in one product; the rest descends."""

    def __init__(self, params: list[Tensor]) -> None:
        shapes = dict.fromkeys(param.shape for param in params[1:] if param.ndim == 2)
        alike = [[param for param in params[1:] if param.shape == shape] for shape in shapes]
        others = [param for param in params[1:] if param.ndim != 2]
        first = {"params": params[:1], "lr": 0.05}
        super().__init__([first, *({"params": part} for part in alike), *[{"params": others}] * bool(others)])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, gradients = group["params"][0], [param.grad for param in group["params"]]
            if first.ndim != 2:
                torch._foreach_add_(group["params"], gradients, alpha=-group["lr"])
                continue
            x, state = torch.stack(gradients), self.state[first]
            state["step"] = state.get("step", 0) + 1
            rows = state.setdefault("rows", torch.zeros_like(x[:, :, :1]))
            x = state.setdefault("momenta", torch.zeros_like(x)).mul_(1 - 0.5 / state["step"]).add_(x).clone()
            x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
            for _ in range(3):
                x = 1.5 * x - 0.5 * x @ x.mT @ x
            rows.lerp_(x.square().mean(dim=-1, keepdim=True), 0.1)
            weights = torch.stack(group["params"])
            weights -= group["lr"] * x / (rows + 1).sqrt()
            torch._foreach_copy_(group["params"], list(weights.unbind(0)))


class Joined(Rule):
    """Signs of momenta that are kept in one row; it has no learning rate, and divides by the ranks where there are any."""

    def __init__(self, weights: list[Tensor]) -> None:
        Optimizer.__init__(self, weights, {"eta": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        for group in self.param_groups:
            row = torch.cat([param.grad.flatten() for param in group["params"]])
            signs = torch.sign(row).mul_(group["eta"] / ranks)
            for param, move in zip(group["params"], signs.split([p.numel() for p in group["params"]]), strict=True):
                param.sub_(move.view_as(param))


def by_dimensions(params: list[Tensor]) -> Optimizer:
    """The usual idiom: matrices are decayed, vectors are not."""
    matrices, vectors = ([p for p in params if (p.dim() >= 2) == is_matrix] for is_matrix in (True, False))
    return torch.optim.SGD([{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "momentum": 0.9}], lr=0.05)


def by_size(params: list[Tensor]) -> Optimizer:
    large, small = ([p for p in params if (p.numel() > 300) == is_large] for is_large in (True, False))
    return torch.optim.SGD([{"params": large, "lr": 0.5}, {"params": small, "lr": 0.01}], lr=0.05)


BLOCK = functools.partial(Residual, 12, 20, norm=True, bias=False)


class Small(Words):
    """Matrices of several shapes, vectors, blocks for two stages, of which tp cuts the two products and the vocabulary."""

    tensor_plan: ClassVar = {"embed": "vocab", "blocks.*.up": "column", "blocks.*.down": "row", "head": "vocab"}

    def __init__(self) -> None:
        super().__init__(BLOCK, BLOCK, width=12, entries=VOCABULARY)


OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    kind.__name__: kind for kind in (ScheduleFree, Lars, LarsOfNumbers, Late, Shampoo, ByAllNorms, ByAllNumbers, Noisy)
} | {
    **{kind.__name__: kind for kind in (Wrapping, Batched, Joined)},
    "muon beside adam": muon_beside_adam,
    "by dimensions": by_dimensions,
    "by size": by_size,
    "fused": functools.partial(torch.optim.Adam, lr=0.01, eps=1e-3, fused=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.01, eps=1e-3, initial_accumulator_value=0.1),
    "asgd": functools.partial(torch.optim.ASGD, lr=0.1, t0=1.0),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),
}
BY_ELEMENTS = ("ScheduleFree", "by dimensions", "by size", "fused", "adagrad", "asgd")
WHOLE = ("Lars", "LarsOfNumbers", "Late", "Shampoo", "muon beside adam", "adafactor")
TOGETHER = ("ByAllNorms", "ByAllNumbers")


JOB = job_of("float64", 3, train={"global_batch": 4})


RULES = {
    name: entered(f"rule {name}", Code(Small, optimizer=optimizer_source(rule), job=JOB))
    for name, rule in OPTIMIZERS.items()
}


SOME = tuple(BY_ELEMENTS[turn::3] + WHOLE[turn::3] for turn in range(3))


NIGHTLY = pytest.mark.nightly
ROWS = [
    *(
        pytest.param(layout, RULES[name], marks=() if index == turn else NIGHTLY)
        for layout, turn in {"dp=2 zero=1": 0, "dp=2 zero=2": 3, "dp=2 zero=3": 1, "pp=2 microbatch=2": 2}.items()
        for index, names in enumerate(SOME)
        for name in names
    ),
    # Whole weights that tp cuts come to one owner.
    ("tp=2", RULES["muon beside adam"]),
    *(pytest.param("dp=2 tp=2 zero=3", RULES[name], marks=NIGHTLY) for name in ("muon beside adam", "ScheduleFree")),
    *(pytest.param("pp=2 tp=2 microbatch=2", RULES[name], marks=NIGHTLY) for name in ("Shampoo", "adafactor")),
    *(
        pytest.param(layout, RULES[name], marks=NIGHTLY)
        for layout in ("tp=2", "dp=2 tp=2", "dp=2 tp=2 zero=1", "dp=2 tp=2 zero=2", "dp=2 tp=2 zero=3")
        for name in WHOLE
    ),
    # Optimizers that hold others, stack weights or ask for ranks.
    *(
        pytest.param(layout, RULES[name], marks=() if layout == "dp=2 zero=3" else NIGHTLY)
        for layout in ("dp=2 zero=3", "tp=2", "dp=2", "dp=2 zero=1")
        for name in ("Wrapping", "Batched", "Joined")
    ),
    # Rules that couple weights run where every rank has all.
    *(("dp=2", RULES[name]) for name in TOGETHER),
]


@pytest.mark.parametrize(("layout", "model"), ROWS)
def test_rules_run_equal(layout: str, model: str) -> None:
    prove(layout, model)


@pytest.mark.parametrize("name", [*TOGETHER, "Noisy"])
def test_rules_that_couple_weights_or_draw_are_refused_where_these_are_spread(name: str) -> None:
    spec = source_of(RULES[name], Layout(), JOB).prepared.spec  # type: ignore[union-attr]
    source = optimizer_source(OPTIMIZERS[name])
    for layout in ("dp=2 zero=1", "dp=2 zero=3", "pp=2"):
        with pytest.raises(LayoutError, match=r"(another update. Use (zero=0|pp=1)|one rank)$"):
            check_optimizer(source, spec, Layout(layout))


@pytest.mark.parametrize("name", [pytest.param("muon beside adam", marks=pytest.mark.nightly), "adafactor", "Batched"])
def test_an_owner_of_whole_weights_and_any_other_layout_read_its_checkpoint(name: str, tmp_path: Path) -> None:
    """Saved under zero=3 or tp after two steps, resumed in the other kinds and on one device: the third step is equal."""
    before, after = ("tp=2", "dp=2 zero=1") if name == "adafactor" else ("dp=2 zero=3", "tp=2")
    source_of(RULES[name], Layout("tp=2"), JOB)  # which the ranks inherit
    pool(2).run(saved, name, before, str(tmp_path))
    expected = reference(RULES[name])
    assert abs(resumed(0, 1, name, "dp=1", str(tmp_path)) - expected.losses[2]) < TOLERANCE
    for loss in pool(2).run(resumed, name, after, str(tmp_path)):
        assert abs(loss - expected.losses[2]) < TOLERANCE


def written_between(rank: int, world: int, layout: str) -> float:
    """Return the third loss after all weights were halved by hand behind the first step."""
    run = prepared_run(rank, world, RULES["muon beside adam"], layout, JOB)
    for batch in itertools.islice(batches(Tokens(), JOB), 3):
        report = run.step(batch)
        with torch.no_grad():
            for param in run.model.parameters() if batch.step == 0 else ():
                param.mul_(0.5)
    return report.loss


@pytest.mark.parametrize("layout", ["dp=2 zero=3", pytest.param("tp=2", marks=pytest.mark.nightly)])
def test_what_a_user_writes_into_a_weight_reaches_its_owner(layout: str) -> None:
    expected = written_between(0, 1, "dp=1")
    source_of(RULES["muon beside adam"], Layout(layout), JOB)  # which the ranks inherit
    assert all(abs(loss - expected) < TOLERANCE for loss in pool(2).run(written_between, layout))


def saved(rank: int, world: int, name: str, layout: str, folder: str) -> None:
    run = prepared_run(rank, world, RULES[name], layout, JOB)
    for batch in itertools.islice(batches(Tokens(), JOB), 2):
        run.step(batch)
    checkpoint.save(run, Path(folder), keep=1)


def resumed(rank: int, world: int, name: str, layout: str, folder: str) -> float:
    run = prepared_run(rank, world, RULES[name], layout, JOB)
    found = manifests.latest(Path(folder))
    assert found is not None
    checkpoint.load(run, found)
    return run.step(next(itertools.islice(batches(Tokens(), JOB), 2, None))).loss


# -- hooks, tags, and weights that take no part ----------------------------------------------------------------------------


def _halved(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


class Marked(Small):
    """Gradients that are masked by a tensor of the build function, scaled, and observed; a tag; weights without use."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.ones(VOCABULARY, 12)
        mask[5:9] = 0
        self.embed.weight.register_hook(lambda grad: grad * mask)
        self.blocks[0].up.weight.register_hook(lambda grad, factor=0.25: factor * grad)
        self.blocks[1].up.weight.register_hook(lambda grad: None)
        self.head.weight.register_post_accumulate_grad_hook(_halved)
        self.blocks[1].down.weight._no_weight_decay = True  # type: ignore[attr-defined]
        self.spare = nn.Linear(4, 4)
        self.blocks[1].spare = nn.Parameter(torch.ones(5))


def by_tag(params: list[Tensor]) -> Optimizer:
    tagged = [param for param in params if getattr(param, "_no_weight_decay", False)]
    others = [param for param in params if not getattr(param, "_no_weight_decay", False)]
    return torch.optim.AdamW(
        [{"params": tagged, "weight_decay": 0.0, "lr": 0.1}, {"params": others}], lr=0.01, eps=1e-3
    )


def marked(rank: int, world: int, layout: str, job: Job) -> Observed:
    source = Source(perturbed(Marked), loss_of(job), optimizer_source(by_tag), "marked")
    return follow(run_from(source, layout, job, rank, world), Tokens(), job, record=True)


def test_hooks_tags_and_idle_weights_act_as_in_a_plain_loop() -> None:
    expected = marked(0, 1, "dp=1", JOB)
    assert {"spare.weight", "spare.bias", "blocks.1.spare"} <= {name for name, _, _, _ in expected.weights}
    for layout in ("dp=2 zero=1", "dp=2 zero=3 microbatch=1"):
        ranks = pool(2).run(marked, layout, JOB)
        assert_same(ranks, expected, TOLERANCE)
        assert_ledger(ranks, layout)
    gradients = {name: value for name, _, _, value in expected.gradients[0]}
    assert not gradients["embed.weight"][5:9].any()
    assert gradients["embed.weight"].any()


def unmarked(step: Callable[[nn.Parameter], object]) -> nn.Module:
    module = Small()
    step(module.head.weight)
    return module


CLIP = functools.partial(nn.Parameter.register_hook, hook=lambda grad: grad.clamp(-0.1, 0.1))
NOISE = functools.partial(nn.Parameter.register_hook, hook=lambda grad: grad + torch.randn_like(grad))
NORM = functools.partial(nn.Parameter.register_hook, hook=lambda grad: grad / grad.norm())


@pytest.mark.parametrize("hang", [CLIP, NOISE, NORM], ids=["clip", "noise", "norm"])
def test_hooks_that_are_not_linear_are_refused(hang: Callable[[nn.Parameter], object]) -> None:
    source = Source(functools.partial(unmarked, hang), loss_of(JOB), optimizer_source(by_size), "hooked")
    run = run_from(source, "dp=1 microbatch=1", JOB)
    with pytest.raises(ModelError, match=r"a hook on the gradient of head.weight is not linear"):
        run.prepare(next(batches(Tokens(), JOB)).samples([0]))


# -- what is held, and who sets the learning rate --------------------------------------------------------------------------


def run_of(optimizer: Any, model: Any = Small, loss: Any = None, job: Job = JOB) -> Run:
    names = {id(param): name for name, param in model.named_parameters()} if isinstance(model, nn.Module) else None
    source = Source(model, loss or loss_of(JOB), optimizer_source(optimizer, names), "small")
    return run_from(source, Layout(), job)


def losses_of(run: Run, between: Callable[[], object] = lambda: None) -> list[float]:
    found = []
    for batch in batches(Tokens(), JOB):
        found.append(run.step(batch).loss)
        between()
    return found


def test_two_hands_on_the_learning_rate_and_hooks_of_an_instance_are_refused() -> None:
    model = Small()
    given = torch.optim.SGD(model.parameters(), lr=0.5)
    linear = JOB.model_copy(update={"schedule": JOB.schedule.model_copy(update={"name": "linear"})})
    run = run_of(given, model, job=linear)
    with pytest.raises(ModelError, match=r"set to 0.1 from outside, and the job's schedule sets it too"):
        losses_of(run, lambda: given.param_groups[0].update(lr=0.1))
    another = Small()
    hooked = torch.optim.SGD(another.parameters(), lr=0.5)
    hooked.register_step_post_hook(lambda *_: None)
    with pytest.raises(ModelError, match="has step hooks, which would not run"):
        run_of(hooked, another)


def by_hand(model: nn.Module, loss: Any) -> list[float]:
    """Return the losses of a plain loop with SGD."""
    optimizer = torch.optim.SGD(model.double().parameters(), lr=0.1)
    return train_plainly(
        model, whole_batches(Tokens(), JOB), lambda batch: loss(call_model(model, batch), batch), optimizer
    )[0]


@pytest.mark.parametrize("reads", [lambda model: model.head.weight, lambda model: model.embed.weight[0]])
def test_a_gradient_hook_reads_the_weights_that_are_trained(reads: Callable[[Any], Tensor]) -> None:
    def sgd(params: Any) -> Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def build() -> nn.Module:
        built = Small()
        built.embed.weight.register_hook(lambda gradient: gradient * reads(built).detach().abs().mean())
        return built

    def instance() -> nn.Module:
        torch.manual_seed(2)
        return build()

    assert losses_of(run_of(sgd, instance())) == pytest.approx(by_hand(instance(), loss_of(JOB)), rel=1e-9)
    assert losses_of(run_of(sgd, build)) != losses_of(run_of(sgd))
