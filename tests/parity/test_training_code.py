"""Training code of users (`training_code.py`) gives a plain torch loop's result in every layout, or is refused by name."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from samestep.building import model as building
from samestep.datasets import batches
from samestep.errors import InputError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.optimizers.optimizer_source import optimizer_source
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.runtime.weights import parameter_hooks
from tests.laboratory import TOLERANCE, run_from
from tests.parity.training_code import CASES, sgd, summed
from tests.plain import train_plainly
from tests.pool import pool, telling

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
JOB = Job(train={"global_batch": 4, "steps": 4, "seed": 3}, numerics={"precision": "float64"}, run={"device": "cpu"})

EQUAL = {
    "dp=2": ("chosen and rejected in one batch", "names in the loss", "norm kept in evaluation by train", "teacher with other data", "decay of the given optimizer", "momenta of the given optimizer cleared", "momentum by a schedule", "step that clips", "hook that clips", "Lookahead", "parts put into evaluation", "norm put into evaluation in turn", "evaluated, and never train() again", "halving hook later", "features caught by a hook", "gradient penalty in the loss"),
    "dp=1 tp=2": ("parts put into evaluation", "evaluated, and never train() again", "halving hook later"),
    "dp=1": ("parts put into evaluation", "clamping hook later", "auxiliary loss of the given instance", "given instance frozen", "number of the given instance", "given instance clamped", "given instance evaluated", "given instance put into evaluation", "given instance with a hook", "given instance with a hook on a gradient", "given instance shrunk by data", "momenta of the given optimizer cleared"),
    "dp=1 microbatch=2": ("chosen and rejected in one batch", "weights of two tasks", "names in the loss"),
    "dp=2 zero=3": ("norm put into evaluation in turn", "decay of the given optimizer", "momenta of the given optimizer cleared", "momentum by a schedule", "Lookahead"),
}  # fmt: skip
REFUSED = {
    "dp=1": {
        "a mean as the loss": r"returned one number: if it is a mean over samples, use samestep.mean_over",
        "layer thawed later": r"a.weight was frozen when the run was made",
        "group added to the given optimizer": r"has 2 groups, and had 1",
        "norm built in evaluation, and trained": r"norm was in evaluation mode when the run was made",
        "given instance with another part": r"b was replaced by another module",
        "given optimizer loaded": r"a state dict of the SGD of a run would have the states of this rank's weights alone",
        "given optimizer with a hook": r"the SGD of the run was given step hooks",
        "given optimizer with fewer weights": r"the SGD of the run was given other parameters",
    },
    "dp=2": {
        "auxiliary loss of the given instance": r"the loss reads aux of the model, which each forward sets",
        "clamping hook later": r"a hook on the gradient of b.weight is not linear",
        "forward that returns a mean of some labels": r"influence each other by nll_loss_forward.* or a loss function .* that computes it from the logits",
        "loss divided by the ranks": r"by_ranks calls torch.distributed.get_world_size",
        "forward that asks for its rank": r"ByRank.forward calls torch.distributed.get_rank",
    },
    "tp=2": {
        "features caught by a hook": r"the loss depends on b.\w+ of the model, but not through the outputs",
        "gradient penalty in the loss": r"the loss depends on \w.\w+ of the model, but not through the outputs",
    },
    "dp=1 pp=2": {
        "part swapped later": r"b was replaced by another module",
        "part taken out later": r"b was replaced by another module",
        "given instance with another part": r"b was replaced by another module",
    },
    "dp=2 zero=3": {
        "parametrization later": r"b.weight was moved to another module, and .*zero=3 looks for it by its name",
        "weight moved later": r"b.weight was moved to another module, and .*zero=3 looks for it by its name",
        "part swapped later": r"b was replaced by another module",
        "teacher with other data": r"teacher.a.weight was given another tensor",
        "halving hook later": r"a hook was registered on the gradient of b.weight in run.model, and under zero=3",
        "step that clips": r"does not update every weight separately",
        "hook that clips": r"does not update every weight separately",
    },
}


def _losses(rank: int, world: int, layout: str, names: tuple[str, ...]) -> dict[str, list[float] | str]:
    """Return the losses of each case in a layout, or the text of its refusal."""
    found: dict[str, list[float] | str] = {}
    for name in names:
        try:
            found[name] = _run(rank, world, layout, name)
        except InputError as error:
            found[name] = str(error)
    return found


def _run(rank: int, world: int, layout: str, name: str) -> list[float]:
    torch.manual_seed(7)
    case = CASES[name]
    model, loss, optimizer = case.made()
    is_instance = isinstance(model, nn.Module)
    names = {id(param): path for path, param in model.named_parameters()} if is_instance else None
    source = Source(model, loss, optimizer_source(optimizer, names), "model")
    run = run_from(source, layout, JOB, rank, world)
    losses = []
    for batch in batches(case.data(), JOB):
        losses.append(run.step(batch).loss)
        if case.each is not None:
            case.each(run.model, None)
    return losses


@functools.cache
def _plain(name: str) -> list[float]:
    """Return the losses of a plain torch loop, from the run's first weights."""
    torch.manual_seed(7)
    case = CASES[name]
    stream = list(batches(case.data(), JOB))
    model, loss, optimizer = case.made()
    if not isinstance(model, nn.Module):
        first = Run(Source(model, loss, optimizer_source(_first_sgd), "model"), Layout(), JOB, _ALONE)
        first.prepare(stream[0].samples([0]))
        model = model()
        model.double().load_state_dict(first.state_dict())
        optimizer = optimizer(list(model.parameters()))
    model.double().train()

    def of_batch(batch: Any) -> Any:
        samples = tree_map_only(
            Tensor, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch.samples(batch.indices)
        )
        return loss(building.call_model(model, samples), samples)

    after = (lambda: None) if case.each is None else functools.partial(case.each, model, optimizer)
    return train_plainly(model, stream, of_batch, optimizer, after=after)[0]


_ALONE = RankInfo(0, 0, 1, 1, torch.device("cpu"))


_first_sgd = functools.partial(torch.optim.SGD, lr=0.0)


def _on_ranks(layout: str, names: tuple[str, ...]) -> dict[str, list[float] | str]:
    world = Layout(layout).world_size
    if world == 1:
        return _losses(0, 1, layout, names)
    return pool(world).run(_losses, layout, names)[0]


@telling
def _evaluated_on_a_rank(rank: int, world: int) -> None:
    """Take steps of a run whose loop puts a part into evaluation mode on one rank alone; return the refusal."""
    model, loss, optimizer = CASES["parts put into evaluation"].made()
    run = run_from(Source(model, loss, optimizer_source(optimizer), "model"), "dp=2", JOB, rank, world)
    for batch in batches(CASES["parts put into evaluation"].data(), JOB):
        run.step(batch)
        if rank == 1:
            run.model.dropout.eval()


REPLICAS = JOB.model_copy(update={"numerics": JOB.numerics.model_copy(update={"replicas": 2, "exchange_every": 2})})


@telling
def _changed_replica(rank: int, world: int) -> None:
    """Take steps of two replicas, with a change between; return the refusal."""
    source = Source(CASES["step that clips"].made()[0], summed, optimizer_source(sgd), "model")
    run = run_from(source, f"dp={world}", REPLICAS, rank, world)
    for batch in batches(CASES["step that clips"].data(), REPLICAS):
        run.step(batch)
        if batch.step == 1:
            run.evaluate(batch)
            run.updater.optimizer.param_groups[0].update(lr=0.01)  # type: ignore[union-attr]


def _is_equal(found: list[float] | str, expected: list[float]) -> bool:
    return not isinstance(found, str) and all(
        abs(one - other) <= TOLERANCE * max(1.0, abs(other)) for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("layout", EQUAL)
def test_legal_code_is_that_of_a_plain_loop(layout: str) -> None:
    for name, found in _on_ranks(layout, EQUAL[layout]).items():
        assert _is_equal(found, _plain(name)), f"{name}: {found}"


@pytest.mark.parametrize("layout", REFUSED)
def test_what_a_layout_would_change_is_refused_by_name(layout: str) -> None:
    for name, found in _on_ranks(layout, tuple(REFUSED[layout])).items():
        with pytest.raises(InputError, match=REFUSED[layout][name]):
            raise (
                InputError("some-code", f"{name}: {found}")
                if isinstance(found, str)
                else AssertionError(f"{name}: {found}")
            )


def test_a_part_in_evaluation_on_one_rank_alone_is_named_on_all() -> None:
    for refusal in pool(2).run(_evaluated_on_a_rank):
        assert refusal.startswith("dropout is in evaluation mode on some ranks and in training mode on others"), refusal


def test_a_change_of_every_replica_is_not_refused() -> None:
    assert pool(2).run(_changed_replica) == ["", ""]


def test_a_given_instance_may_be_loaded_with_what_the_run_has_trained() -> None:
    torch.manual_seed(7)
    net, loss, optimizer = CASES["given instance clamped"].made()
    names = {id(param): path for path, param in net.named_parameters()}
    run = Run(Source(net, loss, optimizer_source(optimizer, names), "model"), Layout(), JOB, _ALONE)
    for batch in batches(CASES["given instance clamped"].data(), JOB):
        run.step(batch)
        net.load_state_dict(run.state_dict())
        net.eval()
        net(torch.zeros(1, 6).to(net.a.weight))


@pytest.mark.parametrize("layout", ["dp=2 zero=3", "dp=2", "tp=2"])
def test_a_hook_that_is_refused_stays_refused(layout: str) -> None:
    weight, judged = nn.Parameter(torch.ones(3)), dict[int, object]()
    program: Any = SimpleNamespace(step=SimpleNamespace(layout=Layout(layout), num_microbatches=1))
    given = [("a", weight)]
    assert not parameter_hooks.later_refusal(given, program, judged)
    weight.register_hook(lambda gradient: gradient / gradient.norm())
    first = parameter_hooks.later_refusal(given, program, judged)
    assert first
    assert parameter_hooks.later_refusal(given, program, judged) == first


@pytest.mark.parametrize("layout", ["dp=2", "tp=2", "pp=2 microbatch=1"])
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_fails_is_refused_on_one_line(layout: str, register: str) -> None:
    """As one that looks up the optimizer of a weight does, or one that checks shapes."""
    weight, optimizers = nn.Parameter(torch.ones(3, 3)), dict[Any, Any]()
    program: Any = SimpleNamespace(step=SimpleNamespace(layout=Layout(layout), num_microbatches=3))
    getattr(weight, register)(lambda given: optimizers[given].step())
    found = parameter_hooks.later_refusal([("a", weight)], program, {})
    assert "the gradient of a fails on a gradient of its shape (KeyError: " in found
    assert len(found) < 400
    assert "\n" not in found
