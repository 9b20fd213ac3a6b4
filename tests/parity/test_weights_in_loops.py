"""A loop that looks at several elements of a weight of which a rank has a part, or a part of the gradient, is refused by name."""

from __future__ import annotations

import copy
import io
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.building.loss import cross_entropy
from samestep.datasets import read_samples
from samestep.errors import LayoutError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.optimizers.optimizer_source import optimizer_source
from samestep.runtime.run import Run
from tests.laboratory import job_of, make_run, run_from
from tests.models import Tokens
from tests.parity.loops import Block
from tests.plain import assert_as_on_one_device
from tests.pool import pool

JOB = Job(
    train={"global_batch": 4, "steps": 4, "watch_every": 0}, run={"device": "cpu"}, numerics={"precision": "float64"}
)


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor([index, 3, 5]), "labels": torch.tensor([3, 5, index])}


class Words(nn.Module):
    """A model of which tp cuts columns, rows and the vocabulary of an embedding and of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def run_of(rank: int, world: int, layout: str, *, steps: int = 1) -> Run:
    """Return a run that has taken some steps."""
    optimizer = optimizer_source(lambda params: torch.optim.SGD(params, lr=0.1), None)
    run = run_from(Source(Words, cross_entropy, optimizer), layout, JOB, rank, world)
    for _ in range(steps):
        run.step(read_samples(Numbers(), range(4)))
    return run


CUT = ("emb.weight", "blocks.0.up.weight", "blocks.0.up.bias", "blocks.1.down.weight", "head.weight")

WHOLE: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: p.norm(),
    "norm of rows": lambda p: p.div_(p.norm(dim=-1, keepdim=True)),
    "mean of a copy": lambda p: copy.deepcopy(p).mean(),
    "kthvalue": lambda p: p.mul_(p.abs() > p.abs().flatten().kthvalue(2).values),
    "product": lambda p: p.view(-1, 4) @ p.view(4, -1),
    "any": lambda p: bool(torch.isnan(p).any()),
    "equal": lambda p: torch.equal(p, p * 2),
    "element": lambda p: p[0],
    "written element": lambda p: p.__setitem__(0, 0.0),
    "numbers": lambda p: p.tolist(),
    "array": lambda p: p.detach().cpu().numpy(),
    "normal": lambda p: nn.init.normal_(p),
    "noise": lambda p: p.add_(torch.randn_like(p)),
    "copied noise": lambda p: p.copy_(torch.randn(p.shape)),
    "data in its place": lambda p: setattr(p, "data", torch.randn(p.shape).double()),
    "written into the loop's own": lambda p: torch.zeros(p.shape).double().add_(p),
    "cumsum": lambda p: p.cumsum_(0),
    "one vector": lambda p: nn.utils.parameters_to_vector([p]),
    "norms at once": lambda p: torch._foreach_norm([p.data]),
    "file": lambda p: torch.save({"p": p.detach()}, io.BytesIO()),
}
"""Ways to look at several elements of a weight."""

GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: p.grad.norm(),
    "norm of data": lambda p: p.grad.data.norm(2),
    "squares": lambda p: p.grad.pow(2).sum().item(),
    "cosine": lambda p: F.cosine_similarity(p.grad.flatten(), p.grad.flatten(), dim=0),
    "clipped": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "a copy": lambda p: float(p.grad.detach().clone().sum()),
}
"""Ways to look at a gradient."""

ELEMENTS: dict[str, Callable[[Any], Any]] = {
    "factor": lambda p: p.mul_(0.5),
    "clamp": lambda p: p.clamp_(-0.1, 0.1),
    "average": lambda p: p.lerp_(copy.deepcopy(p).add_(0.5), 0.25),
    "mask": lambda p: p.mul_(p.abs() > 0.1),
    "where": lambda p: p.copy_(torch.where(p > 0, p, torch.zeros_like(p))),
    "data": lambda p: p.data.mul_(0.9),
    "shrunk": lambda p: p.sub_(0.01 * p.sign()).pow_(2),
    "all at once": lambda p: torch._foreach_mul_([p], 0.5),
    "constant": lambda p: nn.init.constant_(p, 0.25),
    "flat": lambda p: p.flatten().add_(1 - p.flatten()),
}
"""Ways to change each element by itself."""


def refused(rank: int, world: int, layout: str, kinds: dict[str, str], names: tuple[str, ...]) -> list[str]:
    """Return what ran, of some ways to look at some weights, although it must not."""
    run, ran = run_of(rank, world, layout), []
    for name in names:
        weight = run.model.get_parameter(name)
        before = {one: value.detach().clone() for one, value in run.model.named_parameters()}
        for kind, pattern in kinds.items():
            look = GRADIENTS[kind.removeprefix("gradient: ")] if kind.startswith("gradient: ") else WHOLE[kind]
            with torch.no_grad():
                try:
                    look(weight)
                    ran.append(f"{kind} of {name}")
                except LayoutError as error:
                    if not re.search(pattern, str(error)) or name not in str(error):
                        ran.append(f"{kind} of {name}: {error}")
                for one, value in run.model.named_parameters():
                    one_before = before[one]
                    value.copy_(one_before)
    return ran


OF_WEIGHTS = dict.fromkeys(WHOLE, r"under tp=2 a rank has a shard .*run\.gathered\(\) as model")
OF_GRADIENTS = {
    f"gradient: {kind}": r"Use run.gradients\(\) between .*report.grad_norm, or optimizer.clip_norm"
    for kind in GRADIENTS
}


@pytest.mark.parametrize("layout", ["tp=2", pytest.param("dp=2 zero=3 tp=2", marks=pytest.mark.nightly)])
def test_what_looks_at_several_elements_of_a_part_is_refused(layout: str) -> None:
    kinds = OF_WEIGHTS | OF_GRADIENTS
    if "zero=3" in layout:  # which refuses it by itself, behind the write
        del kinds["data in its place"]
    assert pool(Layout(layout).world_size).run(refused, layout, kinds, CUT) == [[]] * Layout(layout).world_size


def test_gradients_are_refused_of_which_a_rank_has_its_chunk() -> None:
    assert pool(2).run(refused, "dp=2 zero=1", OF_GRADIENTS, (*CUT, "norm.weight")) == [[], []]


def waiting(rank: int, world: int, layout: str) -> list[str]:
    """Return what differs between `param.grad` and `run.gradients()` while gradients wait for an update, and the attributes left behind."""
    run = run_of(rank, world, layout, steps=0)
    for indices in (range(3), range(3, 8)):
        run.backward(read_samples(Numbers(), indices))
    weight = run.model.get_parameter("blocks.0.up.weight")
    read, given = weight.grad, run.gradients()["blocks.0.up.weight"]
    alike = types.SimpleNamespace(grad=_whole(given).clone())
    ran = [] if torch.equal(_whole(read), alike.grad) else ["another gradient"]
    for kind, look in GRADIENTS.items():
        with torch.no_grad():
            if not torch.allclose(torch.as_tensor(_whole(look(weight))), torch.as_tensor(look(alike))):
                ran.append(kind)
    if not torch.allclose(_whole(given), alike.grad):
        ran.append("what was clipped")
    if "zero=3" not in layout:  # where FSDP2 has modules of other classes, which no file holds
        file = io.BytesIO()
        torch.save(run.model.norm, file)  # whole weights, which are saved as such while gradients wait
        kept = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        ran += [name for name, one in kept.named_parameters() if type(one) is not nn.Parameter or vars(one)]
    run.update()
    assert "zero=3" in layout or type(weight) is nn.Parameter
    return ran


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@pytest.mark.parametrize(
    "layout", ["dp=1 microbatch=4", "dp=2 zero=0", pytest.param("dp=2 zero=3", marks=pytest.mark.nightly)]
)
def test_gradients_that_wait_are_those_of_run_gradients_alone(layout: str) -> None:
    ranks = Layout(layout).world_size
    found = pool(ranks).run(waiting, layout) if ranks > 1 else [waiting(0, 1, layout)]
    assert found == [[]] * ranks


def changed(rank: int, world: int, layout: str) -> list[dict[str, Tensor]]:
    """Return the weights of a loop that has changed each element of all, for each way, and has called what is asked in every loop."""
    run, found = run_of(rank, world, layout), []
    first = run.state_dict(on_every_rank=True)
    for change in ELEMENTS.values():
        run.load_state_dict(first)
        for weight in run.model.parameters():
            with torch.no_grad():
                change(weight)
            repr(weight), hash(weight), weight.shape, len(weight)
        run.step(read_samples(Numbers(), range(4, 8)))
        found.append(run.state_dict(on_every_rank=True))
    assert sum(one.numel() for one in run.model.parameters()) == sum(one.numel() for one in Words().parameters())
    run.model.zero_grad(set_to_none=False)
    run.model.zero_grad()
    run.step(read_samples(Numbers(), range(4, 8)))
    kept = copy.deepcopy(run.model.state_dict())
    run.step(read_samples(Numbers(), range(4)))
    run.model.load_state_dict(kept)
    whole = run.state_dict(on_every_rank=True)
    with run.gathered() as model:
        model.load_state_dict(whole)
    if world > 1:
        for part, state in ((run.model, whole), (run.model.head, {"weight": whole["head.weight"]})):
            with pytest.raises(
                LayoutError, match=r"the whole .*under tp=2 a rank has a part. Use run.load_state_dict\(state\)"
            ):
                part.load_state_dict(state, strict=False)
    return [*found, run.state_dict(on_every_rank=True)]


def test_elements_that_a_loop_changes_by_themselves_are_those_of_one_device() -> None:
    expected = changed(0, 1, "dp=1")
    for found in pool(2).run(changed, "tp=2"):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def called(rank: int, world: int, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a loop is given that calls the model, a block and the head by itself."""
    run = run_of(rank, world, layout, steps=0)
    run.prepare(read_samples(Numbers(), [0]))
    x = read_samples(Numbers(), range(4))["x"]
    hidden = run.model.emb(x) if world == 1 else torch.zeros(0)
    logits, one = run.model(x), run.model.blocks[0](torch.ones(2, 4, dtype=torch.float64))
    if world > 1:
        for part in (run.model.head, run.model.blocks[0].up):
            with pytest.raises(
                LayoutError, match=r"was called by the loop itself, and under tp=2 .*Use .*run\.outputs"
            ):
                part(torch.ones(2, 4, dtype=torch.float64))
    return logits.detach(), one.detach(), hidden.detach()


def test_a_loop_that_calls_the_model_or_a_block_is_given_whole_outputs() -> None:
    expected = called(0, 1, "dp=1")
    for found in pool(2).run(called, "tp=2"):
        for one, other in zip(found[:2], expected, strict=False):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def called_between_steps(rank: int, world: int, layout: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses, the sums of the logits and the weights of a loop that calls the model, then writes its weights, and steps."""
    run, found = run_of(rank, world, layout), []
    for start in (0, 4, 2):
        with torch.no_grad():
            found.append(float(run.model(read_samples(Numbers(), range(4))["x"]).sum()))
            for weight in run.model.parameters():
                weight.mul_(0.8)
        found.append(run.step(read_samples(Numbers(), range(start, start + 4))).loss)
    return found, run.state_dict(on_every_rank=True)


@pytest.mark.parametrize("layout", ["dp=2 zero=3", pytest.param("dp=2 zero=2", marks=pytest.mark.nightly)])
def test_a_loop_that_calls_the_model_writes_the_weights_of_the_next_step(layout: str) -> None:
    assert_as_on_one_device(called_between_steps, layout, rtol=1e-9, atol=1e-9)


def of_experts(rank: int, world: int) -> list[str]:
    """Return which weights of experts a loop could take a norm of, under ep=2."""
    run = make_run(rank, world, "mixtral", "dp=2 ep=2", job_of("float64", 2))
    stream = iter(samestep.batches(Tokens(), run.job))
    run.step(next(stream))
    ran = []
    for name, weight in run.model.named_parameters():
        if "experts" in name:
            weight.detach().mul_(0.5)
            with pytest.raises(LayoutError, match=r"under ep=2 a rank has a shard .*run.gathered\(\)"):
                ran.append((name, weight.norm()))
            with pytest.raises(LayoutError, match=r"run.gradients\(\)"):
                ran.append((name, weight.grad.norm() if weight.grad is not None else weight.norm()))
    run.backward(next(stream))
    name, weight = next((name, weight) for name, weight in run.model.named_parameters() if "experts" in name)
    with pytest.raises(LayoutError, match=r"between run.backward and run.update a rank has a shard. Use run.gradients"):
        ran.append((name, torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)))
    return ran


def test_norms_of_the_experts_of_a_rank_are_refused() -> None:
    assert pool(2).run(of_experts) == [[], []]


def summed(rank: int, world: int) -> str:
    """Return what a loop is told that sums up the gradients of all stages."""
    run = run_of(rank, world, "pp=2 microbatch=2")
    run.model.zero_grad(set_to_none=False)
    run.step(read_samples(Numbers(), range(4)))
    with pytest.raises(LayoutError) as said:
        float(sum(one.grad.norm() ** 2 for one in run.model.parameters() if one.grad is not None))
    run.model.zero_grad()
    run.step(read_samples(Numbers(), range(4)))
    return str(said.value)


def test_gradients_of_another_stage_are_not_left_out_of_a_sum() -> None:
    for said in pool(2).run(summed):
        assert re.search(r"\.grad is in another stage of the pipeline\. .* use report\.grad_norm", said)
