"""What a loop calls between steps gives the result of one device in every layout: means, predictions, whole weights."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import samestep
from samestep.building.loss_result import Loss
from samestep.datasets import read_samples
from samestep.errors import DataError, LayoutError, ModelError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.optimizers.optimizer_source import optimizer_source
from samestep.runtime.run import Run
from tests.laboratory import run_from
from tests.parity.loops import Block
from tests.parts import Points
from tests.plain import Trained, assert_trained, train_plainly, whole_batches
from tests.pool import pool

JOB = Job(
    train={"global_batch": 4, "steps": 5, "watch_every": 0}, run={"device": "cpu"}, numerics={"precision": "float64"}
)
LAYOUTS = ["dp=2", "dp=2 zero=3 microbatch=1", "tp=2", "pp=2 microbatch=2"]


class Padded(Points):
    """Samples of 1 to 3 rows, which `read` pads to the longest of those that are read together."""

    def read(self, indices: Any) -> dict[str, Tensor]:
        rows = [self[int(index)]["x"].expand(1 + int(index) % 3, 4) for index in indices]
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        is_row = torch.arange(padded.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
        return {"x": padded, "mask": is_row, "labels": 2 * padded}


class Net(nn.Module):
    """Nested outputs, of which one has no dimension of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        for block in self.blocks:
            x = block(x)
        last = self.norm(x)
        return {"logits": last, "more": [x, (x.sum(-1), None)], "scale": torch.tensor(0.5, dtype=x.dtype)}


class OfTheBatch(Net):
    """An output that differs between samples, and has no dimension of them."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        outputs = super().forward(x)
        return outputs | {"mean": outputs["logits"].mean(0)}


def loss(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    errors = (outputs["logits"] - batch["labels"]).square().mean(-1)
    is_counted = batch.get("mask", torch.ones_like(errors))
    return (errors * is_counted).sum(), is_counted.sum()


def measure(outputs: Any, batch: Any) -> dict[str, tuple[Tensor, int]]:
    logits = outputs["logits"]
    return {"largest": (logits.amax(-1).sum(), len(logits)), "positive": ((logits > 0).sum(), logits.numel())}


def fresh_run_of(rank: int, world: int, layout: str, model: Any = Net, used: Loss = loss, kind: Any = None) -> Run:
    """Return a run that is not prepared."""
    optimizer = optimizer_source(kind or (lambda params: torch.optim.AdamW(params, lr=0.01)), None)
    return run_from(Source(model, used, optimizer), layout, JOB, rank, world)


def run_of(rank: int, world: int, layout: str, model: Any = Net, used: Loss = loss) -> Run:
    run = fresh_run_of(rank, world, layout, model, used)
    run.prepare(read_samples(Points(), [0]))
    return run


def everywhere(layout: str, function: Any, *args: Any) -> list[Any]:
    """Return what a function of (rank, world, layout) returns on each rank of a layout."""
    ranks = Layout(layout).world_size
    return pool(ranks).run(function, layout, *args) if ranks > 1 else [function(0, 1, layout, *args)]


def prove_as_alone(layout: str, function: Any, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    """Hold the tensors that a function returns on each rank of a layout against those of one device."""
    (alone,) = everywhere("dp=1", function)
    for found in everywhere(layout, function):
        for ours, theirs in zip(found, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


@functools.cache
def plain() -> nn.Module:
    """The model of one device, with the weights that every run begins with."""
    model = Net().double()
    model.load_state_dict(run_of(0, 1, "dp=1").state_dict())
    return model.eval()


# -- means and predictions -------------------------------------------------------------------------


def measured(rank: int, world: int, layout: str) -> tuple[list[dict[str, float]], Any, list[Any]]:
    run = run_of(rank, world, layout)
    means = [run.evaluate(Points()), run.evaluate(Points(), measure), run.evaluate(Points(), lambda o, b: loss(o, b))]
    return means, run.predict(Points()), run.predict(Padded()) if layout in OF_LENGTHS else []


OF_LENGTHS = ("dp=1", "dp=2 zero=3 microbatch=1")
"""Layouts in which samples of sizes of their own are predicted too, one by one."""


@pytest.mark.parametrize("layout", ["dp=1", *LAYOUTS])
def test_means_count_each_sample_once_and_predictions_are_the_outputs_in_order(layout: str) -> None:
    whole: Any = read_samples(Points(), range(13))
    with torch.no_grad():
        outputs = plain()(whole["x"])
        padded = [plain()(Padded().read([index])["x"])["logits"][0] for index in range(13)]
    pairs = {"loss": loss(outputs, whole), **measure(outputs, whole)}
    wanted = {name: float(total) / float(count) for name, (total, count) in pairs.items()}
    for (alone, measures, named), found, each in everywhere(layout, measured):
        assert alone == pytest.approx({"loss": wanted["loss"]}, rel=1e-12)
        assert measures == pytest.approx(wanted, rel=1e-12)
        assert named == pytest.approx({"loss": wanted["loss"], "measure": wanted["loss"]}, rel=1e-12)
        assert list(found) == list(outputs)
        ours = found["logits"], found["more"][0], found["more"][1][0], found["scale"]
        theirs = outputs["logits"], outputs["more"][0], outputs["more"][1][0], outputs["scale"]
        assert all(torch.allclose(one, other, rtol=1e-12, atol=1e-12) for one, other in zip(ours, theirs, strict=True))
        assert found["more"][1][1] is None
        assert len(each) == (13 if layout in OF_LENGTHS else 0)
        for one, other in zip(each, padded, strict=False):
            torch.testing.assert_close(one["logits"], other, rtol=1e-12, atol=1e-12)


def test_an_output_of_the_samples_that_run_together_is_refused() -> None:
    run = run_of(0, 1, "dp=1", OfTheBatch)
    with pytest.raises(DataError, match=r"outputs\['mean'\] has no dimension of samples, and differs .* run.evaluate$"):
        run.predict(Points())


# -- weights that are set and read ------------------------------------------------------------------


class Tied(Net):
    """A weight with two names, a frozen one, one that no rank need cut, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.first = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.head.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("passing", torch.ones(1), persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        self.seen += self.training
        outputs = super().forward(self.again(self.first(x)))
        return outputs | {"logits": self.head(outputs["logits"]) * self.scale}


def trained(run: Run, steps: int, first: int = 0) -> list[float]:
    stream = samestep.batches(Points(), run.job, first_step=first)
    return [run.step(next(stream)).loss for _ in range(steps)]


def changed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Other values for each weight; those of two names stay one."""
    return {name: 0.5 * one + 0.01 for name, one in state.items()}


def written(rank: int, world: int, layout: str) -> Trained:
    """Train, with other values for the whole weights in front of each step but the first, set in another way each time."""
    run = run_of(rank, world, layout, Tied)
    losses = trained(run, 1)
    run.load_state_dict(changed(run.state_dict()))  # on rank 0 alone
    losses += trained(run, 1, 1)
    run.load_state_dict(changed(run.state_dict(on_every_rank=True)))
    losses += trained(run, 1, 2)
    with run.gathered() as model:  # state dicts of the model and of a part of it, each loaded within and read again
        state = changed({name: one.detach().clone() for name, one in model.state_dict().items()})
        model.load_state_dict(state)
        model.norm.load_state_dict(model.norm.state_dict())
        assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
    losses += trained(run, 1, 3)
    with run.gathered() as model:  # new tensors in the place of weights and buffers, as pruning puts a new mask
        for part in list(model.modules()):
            for held in (part._parameters, part._buffers):
                for leaf, one in list(held.items()):
                    if one is not None and leaf != "passing":
                        new = one.detach() * 0.5 + 0.01
                        setattr(part, leaf, nn.Parameter(new) if held is part._parameters else new)
    return losses + trained(run, 1, 4), run.state_dict(on_every_rank=True)


@functools.cache
def plainly() -> Trained:
    """The same in a plain loop."""
    model = Tied().double()
    model.load_state_dict(run_of(0, 1, "dp=1", Tied).state_dict())
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)

    def of_step(numbered: tuple[int, Any]) -> Any:
        step, samples = numbered
        if step:
            model.load_state_dict(changed(model.state_dict()))
        return loss(model(samples["x"]), samples)

    return train_plainly(model, enumerate(whole_batches(Points(), JOB)), of_step, optimizer)


SETTING = ["dp=1", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "tp=2", "pp=2 microbatch=4"]


@pytest.mark.parametrize("layout", SETTING)
def test_whole_weights_are_set_amid_training(layout: str) -> None:
    assert_trained(everywhere(layout, written), plainly(), 1e-9, 1e-9, 1e-9)


def kept(rank: int, world: int, layout: str) -> list[Any]:
    """An average of the model, copies and files of it and of a part, made within; and what they, the model and its parts compute."""
    run = run_of(rank, world, layout, Tied)
    trained(run, 1)
    x, before = Points()[0]["x"][None], [id(one) for one in run.model.parameters()]
    with run.gathered() as model:
        assert {name: one.shape for name, one in model.named_parameters()} == SHAPES
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        file = io.BytesIO()
        torch.save(model, file)
        whole = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        norms = [copy.deepcopy(model.norm), pickle.loads(pickle.dumps(model.norm))]
        assert norms[0].weight is not model.norm.weight
        assert type(whole) is Tied
        for one in (average, whole):
            assert not any(part._forward_hooks or part._forward_pre_hooks for part in one.modules())
        found = [model(x)["logits"], model(mask=None, x=x)["logits"], model.norm(x), model.blocks[1](x)]
        model.eval()
        found.append(model(x)["logits"])
        model.train()
        with torch.no_grad():
            model.norm.weight.mul_(0.5)
            found.append(model(x)["logits"])
            model.norm.bias = nn.Parameter(model.norm.bias + 1)
            found.append(model(x)["logits"])
    assert before == [id(one) for one in run.model.parameters()]
    for step in range(1, 3):
        found += map(torch.tensor, trained(run, 1, step))
        with run.gathered() as model:
            average.update_parameters(model)
    with torch.no_grad():
        found += [average(x)["logits"], whole(x)["logits"], *(norm(x) for norm in norms)]
    return [
        *found,
        *average.module.state_dict().values(),
        *whole.state_dict().values(),
        *run.state_dict(on_every_rank=True).values(),
    ]


SHAPES = {name: one.shape for name, one in Tied().named_parameters()}


def began(rank: int, world: int, layout: str) -> list[Any]:
    """The same before the first step, where the loop writes too, reads the state twice and takes a copy."""
    run = fresh_run_of(rank, world, layout, Tied)
    first, x = run.state_dict(on_every_rank=True), Points()[0]["x"][None]
    with run.gathered() as model:
        assert type(model) is Tied
        found = [*model.state_dict().values(), model.norm(x), model(x)["logits"], copy.deepcopy(model)(x)["logits"]]
        with pytest.raises(ModelError, match=r"run\.step within run\.gathered"):
            trained(run, 1)
    assert all(
        torch.equal(one, run.state_dict(on_every_rank=True)[name]) for name, one in first.items() if name != "seen"
    )
    with run.gathered() as model, torch.no_grad():
        assert float(model.seen) == 1.0
        model.head.weight.mul_(0.5)
    return [*first.values(), *found, *map(torch.tensor, trained(run, 2)), *run.state_dict(on_every_rank=True).values()]


@pytest.mark.parametrize("body", [kept, began])
@pytest.mark.parametrize("layout", SETTING[1:])
def test_the_model_its_copies_and_its_forwards_within_are_those_of_one_device(layout: str, body: Any) -> None:
    prove_as_alone(layout, body)


def of_transformers() -> nn.Module:
    """A model of which tensor parallelism sets attributes anew: the numbers of features of its layers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


class Texts(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(32, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def next_tokens(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    wanted = batch["input_ids"][:, 1:]
    return nn.functional.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), wanted, reduction="sum"), wanted.numel()


def generated(rank: int, world: int, layout: str) -> list[Tensor]:
    """What transformers generates within, by the model and by a copy, before the first step and after two."""
    run = fresh_run_of(
        rank, world, layout, of_transformers, next_tokens, lambda params: torch.optim.SGD(params, lr=0.5)
    )
    stream, prompts, found = samestep.batches(Texts(), JOB), torch.tensor([[1, 2, 3], [4, 5, 6]]), []
    for _ in range(3):
        with run.gathered() as model, torch.no_grad():
            for one in (model, copy.deepcopy(model)):
                found.append(
                    one.eval().generate(
                        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=5, do_sample=False
                    )
                )
                found.append(one(prompts).logits)
        run.step(next(stream))
    return found


def test_transformers_generate_within_what_they_generate_on_one_device() -> None:
    prove_as_alone("tp=2", generated, rtol=1e-9, atol=1e-10)


def unequal(rank: int, world: int, layout: str) -> str:
    """What is said of other values on each rank before the first step."""
    run = fresh_run_of(rank, world, layout, Tied)
    with pytest.raises(ModelError) as error, run.gathered() as model, torch.no_grad():
        model.norm.weight.add_(rank)
    return str(error.value)


def misplaced(rank: int, world: int, layout: str) -> list[str]:
    run, found = run_of(rank, world, layout), []
    for change in (
        lambda norm: setattr(norm, "bias", nn.Parameter(torch.zeros(3))),
        lambda norm: delattr(norm, "bias"),
    ):
        with pytest.raises(ModelError) as error, run.gathered() as model:
            change(model.norm)
        found.append(str(error.value))
    trained(run, 1)
    return found


def test_what_fits_no_whole_weight_is_refused() -> None:
    for refusal in everywhere("dp=2", unequal):
        assert refusal.startswith("run.gathered(): ranks have written different values into norm.weight, rank")
    for shape, nothing in everywhere("dp=2 zero=3 microbatch=1", misplaced):
        assert shape.startswith("run.gathered(): a tensor [3] has replaced norm.bias [4]. Use ")
        assert nothing.startswith("run.gathered(): nothing has replaced norm.bias [4]. Use ")


def begun(rank: int, world: int, layout: str) -> list[list[float]]:
    """Losses of a run that is given a state before its first step, prepared or not, and of one that has trained up to there."""
    run = run_of(rank, world, layout, Tied)
    trained(run, 2)
    state, found = run.state_dict(), []
    for is_prepared in (True, False):
        other = fresh_run_of(rank, world, layout, Tied, kind=lambda params: torch.optim.SGD(params, lr=0.1))
        if is_prepared:
            other.prepare(read_samples(Points(), [0]))
        other.load_state_dict(state)
        found.append(trained(other, 2))
    return found


@pytest.mark.parametrize("layout", ["dp=2 zero=3", "tp=2"])
def test_a_state_is_loaded_before_the_first_step(layout: str) -> None:
    for ready, later in everywhere(layout, begun):
        assert ready == later == pytest.approx(begun(0, 1, "dp=1")[0], abs=1e-9)


WRONG: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda state: state.pop("norm.bias"), r"the dict lacks norm.bias\. Use .* run.state_dict"),
    (lambda state: state.update(more=torch.ones(1)), r"the dict also has more\. Use "),
    (lambda state: state.update({"norm.bias": torch.ones(3)}), r"another shape of norm.bias \[3\], here \[4\]"),
    (lambda state: state.clear(), r"lacks scale, seen, blocks.0.up.weight and \d+ more"),
]


def test_a_state_of_another_model_is_refused() -> None:
    run = run_of(0, 1, "dp=1", Tied)
    for change, says in WRONG:
        state = run.state_dict()
        change(state)
        with pytest.raises(ModelError, match=f"^run.load_state_dict: .*{says}"):
            run.load_state_dict(state)
        later = fresh_run_of(0, 1, "dp=1", Tied)
        with pytest.raises(ModelError, match=f"^run.load_state_dict: .*{says}"):
            (later.load_state_dict(state), trained(later, 1))


def test_names_of_a_wrapper_and_other_things_are_refused() -> None:
    run = run_of(0, 1, "dp=1", Tied)
    with pytest.raises(ModelError, match=r"Use the names without 'module\.'"):
        run.load_state_dict({f"module.{name}": one for name, one in run.state_dict().items()})
    with pytest.raises(ModelError, match=r"was given a Linear. Use a dict of tensors by name"):
        run.load_state_dict(nn.Linear(1, 1))  # type: ignore[arg-type]


ASKING: dict[str, Callable[[nn.Module], Any]] = {
    "written to a file": lambda model: torch.save(model.state_dict(), io.BytesIO()),
    "numbers": lambda model: [float(one.detach().norm()) for one in model.parameters()],
    "a branch": lambda model: [bool(torch.isnan(one).any()) for one in model.parameters()],
    "arrays": lambda model: {name: one.cpu().numpy() for name, one in model.state_dict().items()},
    "one vector": lambda model: torch.nn.utils.parameters_to_vector(model.parameters()),
}


def _asked(rank: int, world: int, layout: str) -> list[str]:
    run, found = run_of(rank, world, layout), []
    for ask in ASKING.values():
        with pytest.raises(LayoutError) as refused:
            ask(run.model)
        found.append(str(refused.value))
    with run.gathered() as model:
        for ask in ASKING.values():
            ask(model)
    first, last = run.model.get_parameter("blocks.0.up.weight"), run.model.get_parameter("blocks.1.up.weight")
    with torch.no_grad():
        for one in run.model.parameters():  # which moves each by itself, as in a loop over all weights
            one.mul_(0.5)
        with pytest.raises(LayoutError) as refused:  # a block of each stage is moved towards one of the other
            (first.add_(0.1 * last), last.add_(0.1 * first))
    return [*found, str(refused.value)]


def test_values_of_another_stage_are_refused_by_name() -> None:
    for of_rank in pool(2).run(_asked, "pp=2 microbatch=2"):
        for said in of_rank:
            assert re.search(r"is in another stage of the pipeline.* run.gathered\(\) as model", said)
