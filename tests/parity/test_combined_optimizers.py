"""Groups with an optimizer of their own: Muon over matrices and AdamW over the rest, as a plain torch loop with both."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import samestep
from samestep.building.initial_values import blueprint
from samestep.building.loss import loss_of
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.errors import InputError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.memory.memory_use import at_rest
from samestep.program.ops import BYTES_OF
from samestep.program.update_rules import states_per_param, with_whole_updates
from samestep.runtime.checkpoints import checkpoint
from samestep.runtime.optimizers.optimizer_source import check_optimizer
from samestep.runtime.run import Run
from samestep.strategies import programs_of
from tests import traced
from tests.laboratory import (
    TOLERANCE,
    Observed,
    assert_ledger,
    assert_same,
    follow,
    job_of,
    perturbed,
    prove,
    run_from,
    whole,
)
from tests.models import VOCABULARY, Tokens
from tests.parity.loops import LOOPS, Loop, Points, both, built
from tests.parity.loops import job_of as job_of_loop
from tests.parity.test_update_rules import Small
from tests.plain import assert_trained, train_plainly, whole_batches
from tests.pool import pool

MATRICES = ["blocks.*.up.weight", "blocks.*.down.weight"]
OPTIMIZER = {
    "name": "adamw",
    "lr": 0.01,
    "weight_decay": 0.1,
    "no_weight_decay": ["*.norm.*"],
    "options": {"eps": 1e-3},
    "groups": [{"match": MATRICES, "name": "Muon", "lr": 0.02, "weight_decay": 0.05, "options": {"momentum": 0.9}}],
}


def is_matrix(name: str) -> bool:
    return name.endswith(("up.weight", "down.weight"))


JOB = job_of(
    "float64", 3, train={"global_batch": 4, "watch_every": 1}, optimizer=OPTIMIZER, schedule={"name": "linear"}
)


def source_of(job: Job = JOB) -> Source:
    source = Source(perturbed(Small), loss_of(job), optimizer_of(job), "small")
    example = next(batches(Tokens(), job)).samples([0])
    return replace(source, prepared=traced.prepared(("small", Tokens), source, job, example, Layout(), for_any=True))


def run_of(layout: str, rank: int = 0, world: int = 1) -> Run:
    return run_from(source_of(), layout, JOB, rank, world)


def observe(rank: int, world: int, layout: str) -> Observed:
    run = run_of(layout, rank, world)
    seen = follow(run, Tokens(), JOB, record=True)
    held = sum(
        value.numel() * value.element_size()
        for piece in run.updater.pieces
        for value in run.updater.state_of(piece).values()
        if isinstance(value, torch.Tensor) and value.shape == piece.value.shape
    )
    use, none = (at_rest(run.program, number, rank) for number in (states_per_param(JOB), 0))
    of_muon = sum(p.value.numel() for p in run.updater.pieces if is_matrix(p.name))
    assert use.optimizer - none.optimizer + of_muon * BYTES_OF["float64"] == held
    return seen


@functools.cache
def alone() -> Observed:
    return observe(0, 1, "dp=1")


def test_losses_and_weights_are_those_of_a_plain_loop_with_two_optimizers() -> None:
    plan = blueprint(perturbed(Small), JOB.train.seed)
    model = Small().double()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(plan.materialize(name, torch.device("cpu"), torch.float64))
    losses = trained_plainly(model)
    assert alone().losses == pytest.approx(losses, rel=1e-9)
    weights = whole([alone().weights])
    for name, param in model.named_parameters():
        torch.testing.assert_close(weights[name].view(param.shape), param.detach(), rtol=1e-7, atol=1e-9)


def trained_plainly(model: nn.Module) -> list[float]:
    named = dict(model.named_parameters())
    matrices = [param for name, param in named.items() if is_matrix(name)]
    norms = [param for name, param in named.items() if ".norm." in name]
    others = [param for param in named.values() if not any(param is one for one in matrices + norms)]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.05, momentum=0.9)
    adamw = torch.optim.AdamW(
        [{"params": others}, {"params": norms, "weight_decay": 0.0}], lr=0.01, weight_decay=0.1, eps=1e-3
    )
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 - step / 2) for one in (muon, adamw)]

    def loss(batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch["input_ids"]).view(-1, VOCABULARY), batch["labels"].flatten())

    return train_plainly(model, whole_batches(Tokens(), JOB), loss, [muon, adamw], schedules=schedules)[0]


def own_muon(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.02, weight_decay=0.05, momentum=0.9)


def losses_with_a_function(rank: int, world: int, layout: str) -> list[float]:
    group = {"match": MATRICES, "name": f"{own_muon.__module__}:own_muon"}
    job = Job(**{**JOB.model_dump(), "optimizer": {**OPTIMIZER, "groups": [group]}})
    return follow(run_from(source_of(job), layout, job, rank, world), Tokens(), job).losses


def test_a_function_makes_the_optimizer_of_a_group() -> None:
    for losses in pool(2).run(losses_with_a_function, "dp=2 zero=3"):
        assert losses == pytest.approx(alone().losses, rel=1e-9)


LAYOUTS = ["dp=2 zero=1", "dp=2 zero=3", "tp=2", "pp=2 microbatch=2"]
NIGHTLY = ["dp=2 zero=2", "dp=2 tp=2 zero=3", "pp=2 tp=2 microbatch=2"]


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(text, marks=pytest.mark.nightly) for text in NIGHTLY)])
def test_every_layout_is_equal_and_gathers_the_matrices_alone(layout: str) -> None:
    ranks = pool(Layout(layout).world_size).run(observe, layout)
    assert_same(ranks, alone(), TOLERANCE)
    assert_ledger(ranks, layout)
    source = source_of()
    assert source.prepared is not None
    spec = check_optimizer(source.optimizer, source.prepared.spec, Layout(layout))
    whole_ones = {param.name for param in spec.params if param.is_updated_whole}
    cuts = any(word in layout for word in ("zero", "tp"))
    assert whole_ones == ({param.name for param in spec.params if is_matrix(param.name)} if cuts else set())
    exchanged = sum(row.size_bytes for rows in ranks[0].ledger.values() for row in rows if row.kind == "all_to_all")
    assert (exchanged > 0) == any(word in layout for word in ("zero=2", "zero=3", "tp"))
    assert exchanged <= 2 * sum(param.numel for param in spec.params if is_matrix(param.name)) * BYTES_OF["float64"]


def test_gradients_that_are_partial_are_summed_before_owners_have_them() -> None:
    groups = {"groups": [{"match": ["*_proj.weight"], "name": "muon", "lr": 0.02, "options": {}}]}
    prove("dp=2 zero=3 tp=2 sequence_parallel", "llama", job_of("float64", 2, optimizer=groups))


def test_plans_know_which_weights_are_updated_whole() -> None:
    """What is planned from the job alone is what runs, where the rule was read from the optimizer's operations."""
    source = source_of()
    assert source.prepared is not None
    shape = source.prepared.spec
    for where in map(Layout, ["dp=1", *LAYOUTS, *NIGHTLY, "pp=2"]):
        spec = check_optimizer(source.optimizer, shape, where)
        assert with_whole_updates(shape, JOB, where) == spec
        assert programs_of(shape, JOB, where) == programs_of(spec, JOB, where)


def saved(rank: int, world: int, layout: str, folder: Path) -> None:
    run = run_of(layout, rank, world)
    run.prepare(next(batches(Tokens(), JOB)).samples([0]))
    for batch in batches(Tokens(), JOB):
        if batch.step < 2:
            run.step(batch)
    checkpoint.save(run, folder, keep=1)


def resumed(rank: int, world: int, layout: str, folder: Path) -> Observed:
    run = run_of(layout, rank, world)
    run.prepare(next(batches(Tokens(), JOB)).samples([0]))
    checkpoint.load(run, folder / "step-000002")
    seen = Observed()
    for batch in batches(Tokens(), JOB, first_step=2):
        seen.losses.append(run.step(batch).loss)
    seen.weights = [(p.name, p.start, p.stop, p.master().clone()) for p in run.updater.pieces]
    return seen


def test_a_run_is_resumed_in_another_layout(tmp_path: Path) -> None:
    """Saved under zero=3, where a matrix has one owner; the others hold rows of the rest and no matrix at all."""
    pool(2).run(saved, "dp=2 zero=3", tmp_path)
    for ranks in ([resumed(0, 1, "dp=1", tmp_path)], pool(2).run(resumed, "pp=2 microbatch=2", tmp_path)):
        for seen in ranks:
            assert seen.losses == pytest.approx(alone().losses[2:], rel=1e-9)


# -- optimizers as a list or by name ---------------------------------------------------------------

LOOP: Loop = LOOPS["one backward"]
JOB_OF_FORMS = job_of_loop(LOOP, schedule={"name": "linear"})


def is_matrix_of_body(name: str) -> bool:
    return name.startswith("body") and name.endswith("weight")


def muon(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for n, p in named if is_matrix_of_body(n)], lr=0.02, weight_decay=0.05)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for n, p in named if not is_matrix_of_body(n)], lr=0.01, weight_decay=0.1, eps=1e-3)


_adamw_of_list = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, eps=1e-3)


_sgd_of_list = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "list": lambda model: [muon, adamw],
    "mixed": lambda model: {"matrices": muon([*model.named_parameters()]), "others": adamw},
    "modules": lambda model: {"body": _adamw_of_list, "one": _sgd_of_list, "two": _sgd_of_list},
    "one function of names": lambda model: lambda named: torch.optim.AdamW(
        [{"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0}, {"params": [p for n, p in named if "bias" not in n]}],
        lr=0.01, eps=1e-3,
    ),
}  # fmt: skip


def plain_optimizers(form: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    named = [*model.named_parameters()]
    if form == "modules":
        of_module = FORMS[form](model).items()
        return [kind([p for n, p in named if n.startswith(f"{name}.")]) for name, kind in of_module]
    return [FORMS[form](model)(named)] if form.startswith("one") else [muon(named), adamw(named)]


@pytest.mark.parametrize("form", FORMS)
def test_several_optimizers_are_those_of_a_plain_loop(form: str) -> None:
    model, given = built(LOOP).double(), built(LOOP)
    optimizers = plain_optimizers(form, model)
    last = JOB_OF_FORMS.train.steps - 1
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 - step / last) for one in optimizers]
    loss = lambda batch: both(model(batch["x"]), batch)  # noqa: E731
    expected = train_plainly(model, whole_batches(Points(), JOB_OF_FORMS), loss, optimizers, LOOP.clip_norm, schedules)
    run = samestep.parallelize(given, both, FORMS[form](given), layout="dp=1 microbatch=2", job=JOB_OF_FORMS)
    losses = [run.step(batch).loss for batch in samestep.batches(Points(), JOB_OF_FORMS)]
    assert_trained([(losses, run.state_dict())], expected)


REFUSED: dict[str, tuple[Any, str]] = {
    "twice": ({"a": adamw, "b": _sgd_of_list}, r"body.0.bias is held by the optimizers 'a' and 'b'"),
    "a list of one": ([adamw], r"body.0.weight is held by none of the optimizers 0"),
    "left out": ({"a": adamw}, r"body.0.weight is held by none of the optimizers 'a'"),
    "empty": ([], r"optimizer is empty"),
    "a number": ({"a": 3}, r"optimizer\['a'\] = 3 is an int. Use a function of the parameters"),
    "no name": ({1: adamw}, r"optimizer has 1 as a name"),
    "no optimizer": (lambda params: 3, r"the optimizer function returned a int"),
    "its own error": (lambda params: torch.optim.Adam(params, lr=-1.0), "Invalid learning rate"),
}


def refused(rank: int, world: int, case: str) -> str:
    try:
        run = samestep.parallelize(lambda: built(LOOP), both, REFUSED[case][0], job=JOB_OF_FORMS)
        run.step(next(samestep.batches(Points(), JOB_OF_FORMS)))
    except (InputError, ValueError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("case", REFUSED)
def test_optimizers_that_are_no_partition_are_refused_in_one_line(case: str) -> None:
    text = refused(0, 1, case)
    assert re.search(REFUSED[case][1], text), text
    assert "\n" not in text


def test_every_rank_refuses_optimizers_that_are_no_partition() -> None:
    for text in pool(2).run(refused, "left out"):
        assert re.search(REFUSED["left out"][1], text), text
