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
    train={"global_batch": 4, "steps": 4, "watch_every": 0}, run={"device": "cpu"}, numerics={"precision": "float64"}
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


def evaluated(rank: int, world: int, layout: str) -> list[dict[str, float]]:
    run = run_of(rank, world, layout)
    return [run.evaluate(Points()), run.evaluate(Points(), measure), run.evaluate(Points(), lambda o, b: loss(o, b))]


@pytest.mark.parametrize("layout", ["dp=1", *LAYOUTS])
def test_means_count_each_sample_once(layout: str) -> None:
    whole: Any = read_samples(Points(), range(13))
    with torch.no_grad():
        outputs = plain()(whole["x"])
    pairs = {"loss": loss(outputs, whole), **measure(outputs, whole)}
    wanted = {name: float(total) / float(count) for name, (total, count) in pairs.items()}
    for alone, measured, named in everywhere(layout, evaluated):
        assert alone == pytest.approx({"loss": wanted["loss"]}, rel=1e-12)
        assert measured == pytest.approx(wanted, rel=1e-12)
        assert named == pytest.approx({"loss": wanted["loss"], "measure": wanted["loss"]}, rel=1e-12)


def predicted(rank: int, world: int, layout: str) -> Any:
    return run_of(rank, world, layout).predict(Points())


@pytest.mark.parametrize("layout", ["dp=1", *LAYOUTS])
def test_predictions_are_the_outputs_of_all_samples_in_order(layout: str) -> None:
    whole: Any = read_samples(Points(), range(13))
    with torch.no_grad():
        wanted = plain()(whole["x"])
    for found in everywhere(layout, predicted):
        assert list(found) == list(wanted)
        ours = found["logits"], found["more"][0], found["more"][1][0], found["scale"]
        theirs = wanted["logits"], wanted["more"][0], wanted["more"][1][0], wanted["scale"]
        for one, other in zip(ours, theirs, strict=True):
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
        assert found["more"][1][1] is None


def predicted_each(rank: int, world: int, layout: str) -> Any:
    return run_of(rank, world, layout).predict(Padded())


@pytest.mark.parametrize("layout", ["dp=1", "dp=2 zero=3 microbatch=1"])
def test_samples_of_sizes_of_their_own_are_predicted_one_by_one(layout: str) -> None:
    for found in everywhere(layout, predicted_each):
        assert [len(one["logits"]) for one in found] == [1 + index % 3 for index in range(13)]
        for index, one in enumerate(found):
            with torch.no_grad():
                wanted = plain()(Padded().read([index])["x"])["logits"][0]
            assert torch.allclose(one["logits"], wanted, rtol=1e-12, atol=1e-12)


def test_an_output_of_the_samples_that_run_together_is_refused() -> None:
    run = run_of(0, 1, "dp=1", OfTheBatch)
    with pytest.raises(DataError, match=r"outputs\['mean'\] has no dimension of samples, and differs .* run.evaluate$"):
        run.predict(Points())


def test_a_batch_is_evaluated_and_predicted_too() -> None:
    run = run_of(0, 1, "dp=1")
    batch = next(samestep.batches(Points(), JOB))
    assert len(run.predict(batch)["logits"]) == 4
    assert set(run.evaluate(batch)) == {"loss"}


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


State = dict[str, Tensor]


def loaded(rank: int, world: int, layout: str, of_rank_0: bool) -> Trained:
    """Losses before and after a state is loaded amid training, and the weights at the end."""
    run = run_of(rank, world, layout, Tied)
    losses = trained(run, 2)
    state = changed(run.state_dict(on_every_rank=not of_rank_0))
    run.load_state_dict(state)
    return losses + trained(run, 2, 2), run.state_dict(on_every_rank=True)


@functools.cache
def plainly() -> Trained:
    """The same in a plain loop."""
    model = Tied().double()
    model.load_state_dict(run_of(0, 1, "dp=1", Tied).state_dict())
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)

    def of_step(numbered: tuple[int, Any]) -> Any:
        step, samples = numbered
        if step == 2:
            model.load_state_dict(changed(model.state_dict()))
        return loss(model(samples["x"]), samples)

    return train_plainly(model, enumerate(whole_batches(Points(), JOB)), of_step, optimizer)


SETTING = ["dp=1", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "tp=2", "pp=2 microbatch=4"]


@pytest.mark.parametrize("layout", SETTING)
@pytest.mark.parametrize("of_rank_0", [True, False])
def test_a_state_is_loaded_amid_training(layout: str, of_rank_0: bool) -> None:
    assert_trained(everywhere(layout, loaded, of_rank_0), plainly(), 1e-9, 1e-9, 1e-9)


def written_by_dicts(rank: int, world: int, layout: str) -> Trained:
    """The same by state dicts of the model and of a part of it, each loaded within and read again."""
    run = run_of(rank, world, layout, Tied)
    losses = trained(run, 2)
    with run.gathered() as model:
        state = {name: one.detach().clone().mul_(0.5).add_(0.01) for name, one in model.state_dict().items()}
        model.load_state_dict(state)
        part = model.norm.state_dict()
        model.norm.load_state_dict(part)
        assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
    return losses + trained(run, 2, 2), run.state_dict(on_every_rank=True)


@pytest.mark.parametrize("layout", SETTING)
def test_whole_weights_are_written_by_state_dicts(layout: str) -> None:
    assert_trained(everywhere(layout, written_by_dicts), plainly(), 1e-9, 1e-9, 1e-9)


def replaced(rank: int, world: int, layout: str) -> Trained:
    """The same by new tensors in the place of weights and buffers, as pruning puts a new mask."""
    run = run_of(rank, world, layout, Tied)
    losses = trained(run, 2)
    with run.gathered() as model:
        for part in list(model.modules()):
            for held in (part._parameters, part._buffers):
                for leaf, one in list(held.items()):
                    if one is not None and leaf != "passing":
                        new = one.detach() * 0.5 + 0.01
                        setattr(part, leaf, nn.Parameter(new) if held is part._parameters else new)
    return losses + trained(run, 2, 2), run.state_dict(on_every_rank=True)


@pytest.mark.parametrize("layout", SETTING)
def test_tensors_in_the_place_of_whole_weights_are_kept(layout: str) -> None:
    assert_trained(everywhere(layout, replaced), plainly(), 1e-9, 1e-9, 1e-9)


def copied(rank: int, world: int, layout: str) -> list[Any]:
    """An average and a snapshot of a part, made within, which the loop updates and calls itself; what they compute at the end."""
    run = run_of(rank, world, layout, Tied)
    trained(run, 1)
    with run.gathered() as model:
        average, norm = (
            AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True),
            copy.deepcopy(model.norm),
        )
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in average.modules())
        assert average.module.norm.weight is not model.norm.weight
    for step in range(1, 3):
        trained(run, 1, step)
        with run.gathered() as model:
            average.update_parameters(model)
    x = Points()[0]["x"][None]
    with torch.no_grad():
        return [average(x)["logits"], norm(x), *average.module.state_dict().values()]


def pickled(rank: int, world: int, layout: str) -> list[Any]:
    """The model and a part of it, written within to files and read again, and what they compute."""
    run = run_of(rank, world, layout, Tied)
    trained(run, 1)
    with run.gathered() as model:
        file = io.BytesIO()
        torch.save(model, file)
        whole, norm = (
            torch.load(io.BytesIO(file.getvalue()), weights_only=False),
            pickle.loads(pickle.dumps(model.norm)),
        )
    assert type(whole) is Tied
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in whole.modules())
    with torch.no_grad():
        x = Points()[0]["x"][None]
        return [whole(x)["logits"], norm(x), *whole.state_dict().values()]


@pytest.mark.parametrize("body", [copied, pickled])
@pytest.mark.parametrize("layout", SETTING)
def test_copies_of_the_model_are_plain_modules(layout: str, body: Any) -> None:
    prove_as_alone(layout, body)


def called(rank: int, world: int, layout: str) -> list[Any]:
    """What the model and its parts compute within, in both modes, before and after writes; and what the run has then."""
    run = run_of(rank, world, layout, Tied)
    trained(run, 1)
    x = Points()[0]["x"][None]
    with run.gathered() as model:
        found = [model(x)["logits"], model(mask=None, x=x)["logits"], model.norm(x), model.blocks[1](x)]
        model.eval()
        found.append(model(x)["logits"])
        model.train()
        with torch.no_grad():
            model.norm.weight.mul_(0.5)
            found.append(model(x)["logits"])
            model.norm.bias = nn.Parameter(model.norm.bias + 1)
            found.append(model(x)["logits"])
    return [*found, *run.state_dict(on_every_rank=True).values(), *map(torch.tensor, trained(run, 1, 1))]


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


@pytest.mark.parametrize("body", [called, began])
@pytest.mark.parametrize("layout", SETTING)
def test_a_forward_within_is_that_of_one_device(layout: str, body: Any) -> None:
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


@pytest.mark.parametrize("layout", SETTING)
def test_transformers_generate_within_what_they_generate_on_one_device(layout: str) -> None:
    prove_as_alone(layout, generated, rtol=1e-9, atol=1e-10)


def unequal(rank: int, world: int, layout: str) -> str:
    run = fresh_run_of(rank, world, layout, Tied)
    with pytest.raises(ModelError) as error, run.gathered() as model, torch.no_grad():
        model.norm.weight.add_(rank)
    return str(error.value)


def test_ranks_that_write_differently_before_the_first_step_are_refused() -> None:
    for refusal in everywhere("dp=2", unequal):
        assert refusal.startswith("run.gathered(): ranks have written different values into norm.weight, rank")


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


@pytest.mark.parametrize("layout", ["dp=1", "dp=2 zero=3 microbatch=1"])
def test_what_fits_no_whole_weight_is_refused(layout: str) -> None:
    for shape, nothing in everywhere(layout, misplaced):
        assert shape.startswith("run.gathered(): a tensor [3] stands in the place of norm.bias [4]. Use ")
        assert nothing.startswith("run.gathered(): nothing stands in the place of norm.bias [4]. Use ")


def begun(rank: int, world: int, layout: str) -> list[list[float]]:
    """Losses of a run that is given a state before its first step, prepared or not, and of one that has trained up to there."""
    run = run_of(rank, world, layout, Tied)
    trained(run, 2)
    state = run.state_dict()
    optimizer = optimizer_source(lambda params: torch.optim.SGD(params, lr=0.1), None)
    found = []
    for is_prepared in (True, False):
        other = Run(Source(Tied, loss, optimizer), Layout(layout), JOB, run.place)
        if is_prepared:
            other.prepare(read_samples(Points(), [0]))
        other.load_state_dict(state)
        found.append(trained(other, 2))
    return found


@pytest.mark.parametrize("layout", ["dp=1", "dp=2 zero=3", "tp=2"])
def test_a_state_is_loaded_before_the_first_step(layout: str) -> None:
    for ready, later in everywhere(layout, begun):
        assert ready == later == pytest.approx(begun(0, 1, "dp=1")[0], abs=1e-9)


def seen_whole(rank: int, world: int, layout: str) -> tuple[dict[str, tuple[int, ...]], State, bool]:
    run = run_of(rank, world, layout, Tied)
    trained(run, 1)
    before = [id(one) for one in run.model.parameters()]
    with run.gathered() as model:
        shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
        state = {name: one.detach().clone() for name, one in model.state_dict().items()}
    return shapes, state, before == [id(one) for one in run.model.parameters()]


@pytest.mark.parametrize("layout", SETTING)
def test_weights_are_whole_within_gathered(layout: str) -> None:
    ((shapes, state, _),) = everywhere("dp=1", seen_whole)
    for ours, values, is_as_before in everywhere(layout, seen_whole):
        assert is_as_before
        assert ours == shapes
        for name, one in state.items():
            assert torch.allclose(values[name], one, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.pop("norm.bias"), r"the dict lacks norm.bias\. Use .* run.state_dict"),
        (lambda state: state.update(more=torch.ones(1)), r"the dict also has more\. Use "),
        (lambda state: state.update({"norm.bias": torch.ones(3)}), r"another shape of norm.bias \[3\], here \[4\]"),
        (lambda state: state.clear(), r"lacks scale, seen, blocks.0.up.weight and \d+ more"),
    ],
)
@pytest.mark.parametrize("is_prepared", [True, False])
def test_a_state_of_another_model_is_refused(change: Any, says: str, is_prepared: bool) -> None:
    run = run_of(0, 1, "dp=1", Tied)
    state = run.state_dict()
    change(state)
    if not is_prepared:
        run = Run(
            Source(Tied, loss, optimizer_source(lambda params: torch.optim.SGD(params, lr=0.1), None)),
            Layout("dp=1"),
            JOB,
            run.place,
        )
    with pytest.raises(ModelError, match=f"^run.load_state_dict: .*{says}"):
        (run.load_state_dict(state), trained(run, 1))


def test_names_of_a_wrapper_and_other_things_are_refused() -> None:
    run = run_of(0, 1, "dp=1", Tied)
    with pytest.raises(ModelError, match=r"Use the names without 'module\.'"):
        run.load_state_dict({f"module.{name}": one for name, one in run.state_dict().items()})
    with pytest.raises(ModelError, match=r"was given a Linear. Use a dict of tensors by name"):
        run.load_state_dict(nn.Linear(1, 1))  # type: ignore[arg-type]


def calls_within(rank: int, world: int, layout: str) -> None:
    run = run_of(rank, world, layout, Tied)
    with run.gathered() as model, torch.no_grad():
        for call in (
            lambda: run.step(next(samestep.batches(Points(), JOB))),
            lambda: run.evaluate(Points()),
            run.state_dict,
        ):
            with pytest.raises(ModelError, match=r"within run.gathered\(\)"):
                call()
        model.get_parameter("blocks.0.up.weight").fill_(float(rank))


def test_writes_that_differ_between_ranks_are_refused() -> None:
    with pytest.raises(ModelError, match=r"ranks have written different values into blocks.0.up.weight"):
        pool(2).run(calls_within, "dp=2 zero=3")


def mixed_stages(rank: int, world: int, layout: str) -> None:
    """A loop that moves a block of each stage towards one of the other."""
    run = run_of(rank, world, layout)
    first, last = run.model.get_parameter("blocks.0.up.weight"), run.model.get_parameter("blocks.1.up.weight")
    with torch.no_grad():
        for one in run.model.parameters():  # which moves each by itself, as in a loop over all weights
            one.mul_(0.5)
        first.add_(0.1 * last)
        last.add_(0.1 * first)


def test_weights_of_two_stages_are_not_mixed_where_one_has_no_values() -> None:
    with pytest.raises(LayoutError, match=r"is in another stage of the pipeline.* run.gathered\(\) as model"):
        pool(2).run(mixed_stages, "pp=2 microbatch=2")


ASKING: dict[str, Callable[[nn.Module], Any]] = {
    "written to a file": lambda model: torch.save(model.state_dict(), io.BytesIO()),
    "numbers": lambda model: [float(one.detach().norm()) for one in model.parameters()],
    "a branch": lambda model: [bool(torch.isnan(one).any()) for one in model.parameters()],
    "arrays": lambda model: {name: one.cpu().numpy() for name, one in model.state_dict().items()},
    "one vector": lambda model: torch.nn.utils.parameters_to_vector(model.parameters()),
}


def _asked(rank: int, world: int, layout: str, kind: str) -> str:
    run = run_of(rank, world, layout)
    with pytest.raises(LayoutError) as refused:
        ASKING[kind](run.model)
    with run.gathered() as model:
        ASKING[kind](model)
    return str(refused.value)


@pytest.mark.parametrize("kind", ASKING)
def test_values_of_another_stage_are_refused_by_name(kind: str) -> None:
    for said in pool(2).run(_asked, "pp=2 microbatch=2", kind):
        assert re.search(r"is in another stage of the pipeline.* run.gathered\(\) as model", said)
