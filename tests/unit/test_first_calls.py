"""A person's first calls of a run: what is no batch is refused with what works, a data set is evaluated, a finished loop starts again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.datasets import read_samples
from samestep.errors import CheckpointError, DataError, InputError, LayoutError, ModelError, UnprovenError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime import memory_limits
from samestep.runtime.optimizers.optimizer_source import optimizer_source
from samestep.runtime.run import Run
from tests import small
from tests.laboratory import run_from
from tests.parts import Points
from tests.pool import pool

JOB = Job(
    train={"global_batch": 4, "steps": 3, "watch_every": 0}, run={"device": "cpu"}, numerics={"precision": "float64"}
)


class Model(nn.Module):
    """A model with a frozen weight, two names of one weight, and a buffer that its forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("passing", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.seen += 1
        return self.last(self.frozen(self.first(x)))


def run_of(rank: int = 0, world: int = 1, layout: str = "dp=1", model: Any = Model) -> Run:
    optimizer = optimizer_source(lambda params: torch.optim.AdamW(params, lr=0.01), None)
    return run_from(Source(model, samestep.building.loss.mse, optimizer), layout, JOB, rank, world)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            Points(),
            "takes a batch of samestep.batches, or the values of a whole batch .* was given a data set itself. Use ",
        ),
        (iter([]), "takes a batch of samestep.batches, .* was given a list_iterator. Use "),
        (None, "was given None on the only rank. Use a batch of samestep.batches, or the values of a whole batch"),
        ({"x": 3.0}, "without a number of samples. Use tensors with as many rows as there are samples"),
        ((torch.ones(4, 4), torch.ones(3, 4)), "without a number of samples"),
        (torch.ones(0, 4), "a batch without samples. Use at least one sample"),
        (
            {"x": torch.eye(4).to_sparse(1), "labels": torch.ones(4, 1)},
            r"a tensor \[4, 4\] with the layout torch.sparse_.* Use to_dense\(\)",
        ),
    ],
)
def test_a_step_takes_a_batch_and_says_which_call_works(given: Any, text: str) -> None:
    run = run_of()
    with pytest.raises(DataError, match=f"run.step .*{text}"):
        run.step(given)
    if not isinstance(given, Points) and not hasattr(given, "__next__"):
        with pytest.raises(DataError, match=f"run.evaluate .*{text}"):
            run.evaluate(given)


def test_weights_that_do_not_fit_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = read_samples(Points(), range(4))
    monkeypatch.setattr(memory_limits, "limit_bytes", lambda _: 300)  # weights and gradients of 36 float64 numbers: 576
    with pytest.raises(UnprovenError, match=r"needs? .* at the first gradients .* and there are 300 B") as refused:
        run_of().step(batch)
    assert refused.value.code == "memory-predicted"
    allowed = JOB.model_copy(update={"run": JOB.run.model_copy(update={"allow": ("memory",)})})
    run = samestep.parallelize(Model, samestep.building.loss.mse, torch.optim.SGD, job=allowed)
    assert any("is predicted to need" in text for text in (run.step(batch), run.skipped_checks())[1])


class Modes(torch.optim.SGD):
    """An optimizer whose weights are others while it is evaluated."""

    def eval(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.zero_()

    def step(self, closure: Any = None) -> Any:
        self.note()
        return super().step(closure)

    def note(self) -> None:
        self.param_groups[0]["noted"] = self.param_groups[0].get("noted", 0) + 1


def test_a_method_of_the_runs_optimizer_is_refused_and_its_values_are_there() -> None:
    run, batch = (
        samestep.parallelize(Model, samestep.building.loss.mse, Modes, job=JOB),
        read_samples(Points(), range(4)),
    )
    run.step(batch)
    optimizer: Any = run.updater.optimizer
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run.step(batch)
    scheduler.step()
    assert isinstance(optimizer, Modes)
    assert (optimizer.param_groups[0]["noted"], run.step(batch).lr) == (2, 0.0005)
    for name in ("eval", "note"):
        with pytest.raises(ModelError, match=rf'run.updater.optimizer.{name} would .*Use .*run.call\(None, "{name}"\)'):
            getattr(run.updater.optimizer, name)()
    run.call(None, "eval")
    assert run.evaluate({"x": batch["x"], "labels": 0 * batch["x"]})["loss"] == 0.0


def _evaluated(rank: int, world: int, layout: str) -> dict[str, float]:
    return run_of(rank, world, layout).evaluate(Points())


@pytest.mark.parametrize("layout", ["dp=1", "dp=2 zero=3"])
def test_a_data_set_is_evaluated_once_a_sample_in_any_layout(layout: str) -> None:
    run = run_of()
    run.prepare(read_samples(Points(), [0]))
    model = Model().double()
    model.load_state_dict(run.state_dict())
    whole: Any = read_samples(Points(), range(13))
    with torch.no_grad():
        wanted = nn.functional.mse_loss(model.eval()(whole["x"]), whole["labels"])
    ranks = Layout(layout).world_size
    for found in pool(ranks).run(_evaluated, layout) if ranks > 1 else [_evaluated(0, 1, layout)]:
        assert found["loss"] == pytest.approx(wanted.item(), rel=1e-12)


def test_what_is_no_map_style_data_set_is_not_evaluated() -> None:
    with pytest.raises(DataError, match=r"run.evaluate was given a int without __len__"):
        run_of().evaluate(3)
    with pytest.raises(DataError, match=r"run.evaluate was given a data set without samples"):
        run_of().evaluate(torch.utils.data.Subset(Points(), []))


# -- a finished loop -------------------------------------------------------------------------------


def _loop(rank: int, world: int, layout: str, folder: str, everywhere: bool) -> tuple[int, dict[str, Tensor], str]:
    """The loop of README, which a requeued job starts again: continue, take the steps that are left, save."""
    run, taken = run_of(rank, world, layout), 0
    if samestep.latest(folder) is not None:
        run.load(folder)
    for batch in samestep.batches(Points(), JOB, first_step=run.steps_taken):
        run.step(batch)
        taken += 1
    saved = run.save(folder)
    return taken, run.state_dict(on_every_rank=everywhere), saved.name


@pytest.mark.parametrize("layout", ["dp=1", "dp=2 zero=3"])
def test_a_finished_loop_that_starts_again_has_the_same_weights(layout: str, tmp_path: Path) -> None:
    ranks = Layout(layout).world_size

    def start(everywhere: bool) -> Any:
        given = (layout, str(tmp_path), everywhere)
        return pool(ranks).run(_loop, *given) if ranks > 1 else [_loop(0, 1, *given)]

    (taken, first, name), *_ = start(False)
    assert (taken, name) == (3, "step-000003")
    for rank, (taken, again, name) in enumerate(start(everywhere=True)):
        assert (taken, name) == (0, "step-000003"), f"rank {rank}"
        assert [*again] == [*first]
        assert all(torch.equal(again[key], value) and again[key].dtype == value.dtype for key, value in first.items())
    assert all(not held for _, held, _ in start(everywhere=False)[1:])


@pytest.mark.parametrize(
    "source", [Points(), torch.utils.data.DataLoader(Points(), batch_size=4)], ids=["data", "loader"]
)
@pytest.mark.parametrize("makes_batches_anew", [False, True])
def test_a_loop_over_epochs_is_refused_where_train_steps_are_taken(source: Any, makes_batches_anew: bool) -> None:
    """A second epoch would take no step, or the first steps once more under their old numbers."""
    run, steps = run_of(), samestep.batches(source, JOB)
    for batch in steps:
        run.step(batch)
        run.step(batch)  # as often as a loop likes
    again = samestep.batches(source, JOB) if makes_batches_anew else steps
    with pytest.raises(
        DataError, match=r"Set train.steps to the steps of all epochs, and use one loop over samestep.batches"
    ):
        any(run.step(batch) is None for batch in again)
    assert run.steps_taken == 3


def test_a_run_that_goes_on_and_a_stopped_loop_are_no_second_epoch() -> None:
    run, steps = run_of(), samestep.batches(Points(), JOB)
    run.step(next(steps))
    for batch in samestep.batches(Points(), JOB, first_step=run.steps_taken):
        run.step(batch)
    assert [*samestep.batches(Points(), JOB, first_step=run.steps_taken)] == []
    steps.stop()
    assert [*steps] == [*steps] == []


def test_a_loaded_run_that_takes_no_step_saves_elsewhere_what_it_was_given(tmp_path: Path) -> None:
    _loop(0, 1, "dp=1", str(tmp_path / "one"), False)
    run = run_of()
    run.load(tmp_path / "one")
    saved = run.save(tmp_path / "other")
    again = run_of()
    again.load(saved)
    again.prepare(read_samples(Points(), [0]))
    expected = run.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())


def test_of_a_damaged_checkpoint_or_another_model_nothing_is_read(tmp_path: Path) -> None:
    _loop(0, 1, "dp=1", str(tmp_path), False)
    other = run_of(model=lambda: nn.Sequential(nn.Linear(4, 4)))
    other.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds another model's weights: .* Use the model that wrote it"):
        other.state_dict()
    file = next((tmp_path / "step-000003").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-4] + b"xxxx")
    run = run_of()
    run.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"is missing or damaged"):
        run.state_dict()
    with pytest.raises(LayoutError, match=r"not prepared yet"):
        run_of().save(tmp_path)


def test_another_class_of_optimizer_does_not_continue(tmp_path: Path) -> None:
    _loop(0, 1, "dp=1", str(tmp_path), False)
    sgd = optimizer_source(lambda params: torch.optim.SGD(params, lr=0.01), None)
    other = run_from(Source(Model, samestep.building.loss.mse, sgd), "dp=1", JOB)
    other.load(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"with the optimizer AdamW, and this run has SGD. Use the one that wrote"
    ):
        other.prepare(read_samples(Points(), [0]))


def test_weights_of_float64_are_trained_in_float64_or_as_the_job_says() -> None:
    def trained(**numerics: str) -> Run:
        model = nn.Linear(4, 2).double()
        return samestep.parallelize(model, "mse", torch.optim.SGD(model.parameters()), job=Job(numerics=numerics))

    with pytest.raises(
        ModelError, match=r'parameter weight is torch.float64, and numerics.precision is "float32". Set numerics.pre'
    ):
        trained()
    assert trained(precision="float64").job.numerics.precision == "float64"
    assert trained(precision="float32").job.numerics.precision == "float32"


@pytest.mark.parametrize(
    ("dtype", "frozen", "numerics", "says"),
    [
        (torch.bfloat16, "", {}, "parameter 0.weight is torch.bfloat16, "),
        (torch.float16, "", {}, "parameter 0.weight is torch.float16, "),
        (torch.bfloat16, "0.weight", {}, "parameter 0.bias is torch.bfloat16, "),
        (torch.bfloat16, "", {"precision": "float32"}, ""),
        (torch.bfloat16, "", {"precision": "bf16"}, ""),
        (torch.float32, "", {}, ""),
    ],
)
def test_weights_of_half_the_bits_are_trained_in_float32_with_a_line(
    dtype: torch.dtype, frozen: str, numerics: dict[str, str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)).to(dtype)
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    samestep.parallelize(model, "mse", torch.optim.SGD, job=Job(numerics=numerics))
    said = capfd.readouterr().err
    assert said.count("so it is trained in float32. Set it to") == bool(says)
    assert says in said


def _without_none(items: list[Any]) -> Any:
    return torch.stack([item for item in items if item is not None])


def _in_pairs(items: list[Any]) -> Any:
    return torch.stack([items[place ^ 1] for place in range(len(items))])


def _of_four(items: list[Any]) -> Any:
    assert len(items) % 4 == 0, "four at once"
    return torch.stack(items)


@pytest.mark.parametrize("collate", [_without_none, _in_pairs, _of_four])
def test_a_collate_fn_that_fails_on_samples_alone_is_named(collate: Any) -> None:
    samples = [None if index == 0 and collate is _without_none else torch.ones(4) for index in range(8)]
    loader = torch.utils.data.DataLoader(samples, batch_size=8, collate_fn=collate)  # type: ignore[arg-type]
    job = Job(train={"global_batch": 8, "steps": 1})
    run = samestep.parallelize(
        nn.Linear(4, 2), lambda outputs, _: (outputs.sum(), len(outputs)), torch.optim.SGD, job=job
    )
    (batch,) = samestep.batches(loader, job)
    with pytest.raises(DataError, match=r"collate_fn of a \w+ for samples \[\d\], which must take one alone .*Error"):
        run.step(batch)


# -- rows of lists ---------------------------------------------------------------------------------


def test_lists_of_numbers_in_a_sample_are_tensors() -> None:
    rows = [
        {"ids": [1, 2, 3], "pairs": [[0.5, 1.0], [2.0, 3.0]], "label": 1},
        {"ids": [4, 5, 6], "pairs": [[0.0, 0.0]] * 2, "label": 0},
    ]
    found: Any = read_samples(rows, [0, 1])
    assert found["ids"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert found["pairs"].shape == (2, 2, 2)
    assert found["pairs"].dtype == torch.float32
    assert found["label"].tolist() == [1, 0]
    with pytest.raises(DataError, match=r"cannot be stacked into a batch"):
        read_samples([{"ids": [1, 2, 3]}, {"ids": [4]}], [0, 1])


def test_rows_of_hugging_face_are_trained_on_as_they_are() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict(
        {"x": [[float(i)] * 4 for i in range(8)], "labels": [[2.0 * i] * 4 for i in range(8)]}
    )
    run = run_of()
    losses = [run.step(batch).loss for batch in samestep.batches(rows, JOB)]
    assert len(losses) == 3
    assert run.evaluate(rows)["loss"] > 0


def test_a_job_without_printed_samples_is_sampled_from(tmp_path: Path) -> None:
    assert small.train("--out", tmp_path / "run", "--steps", "1", **{"train.steps": 1, "schedule.warmup_steps": 1}) == 0
    assert len(samestep.sample(tmp_path / "run", "abc", temperature=0.0)) > 3
    with pytest.raises(DataError, match=r"tokens = 0: a sample has 1 token or more"):
        samestep.sample(tmp_path / "run", "abc", tokens=0)


def _parallelized(**given: Any) -> Run:
    made = {
        "model": Model,
        "loss": "mse",
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "job": JOB,
    } | given
    return samestep.parallelize(made.pop("model"), made.pop("loss"), made.pop("optimizer"), **made)


def _sharded() -> nn.Module:
    """Return a model after `fully_shard`, whose weights have the attribute of DTensors."""
    model: Any = Model()
    model.first.bias.device_mesh = None
    return model


def _stepped(**given: Any) -> Any:
    return _parallelized(**given).step(next(samestep.batches(Points(), JOB)))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: _parallelized(layout="dp=2"), r"has 2 ranks, but 1 process runs: start 2, as samestep\.launch"),
        (lambda: _parallelized(layout="tp=2 pp=2"), "has 4 ranks, but 1 process runs"),
        (lambda: _parallelized(layout={"dp": 1}), 'is a dict. Use one line of text, such as layout="dp=2 tp=2"'),
        (lambda: _parallelized(layout=None), "layout = None is not accepted. Use one line of text"),
        (lambda: samestep.Layout(3), "3 is not a layout. Use one line of text"),  # type: ignore[arg-type]
        (
            lambda: samestep.train(Job(), lay="dp=2"),
            r"train has no argument lay \(did you mean 'layout'\?\). Use job, layout",
        ),  # type: ignore[call-arg]
        (lambda: samestep.launch(print, nproc=2), "launch has no argument nproc. Use main, args, ranks, layout"),  # type: ignore[call-arg]
        (lambda: _parallelized(fsdp=True), "parallelize has no argument fsdp. Use model, loss, optimizer"),
        (lambda: samestep.plan(Job(), 2, hardware=3), "hardware = 3 is an int. Use the name of a profile"),  # type: ignore[arg-type]
        (lambda: samestep.simulate(Job(), "dp=1", {"name": "mine"}), "is a dict. Use the name of a profile"),  # type: ignore[arg-type]
        (lambda: samestep.explain(3), "run = 3 is an int. Use the path of a file or a folder"),  # type: ignore[arg-type]
        (lambda: Job(layout=3), "layout: 3 is not a layout. Use one line of text"),  # type: ignore[typeddict-item]
        (lambda: Job(layout="fsdp=2"), "layout: unknown layout option 'fsdp': use dp=N zero=3"),
        (lambda: _parallelized(job={"train": {}}), r"is a dict. Use a samestep\.Job: "),
        (lambda: samestep.train("job.toml"), r"is a str. Use a samestep\.Job: .*samestep\.load"),
        (lambda: samestep.batches(JOB, Points()), r"Use a samestep\.Job: "),
        (lambda: samestep.batches(Points(), JOB, first_step=-1), "steps are counted from 0"),
        (lambda: Job({"train": {"steps": 3}}), r"Use Job\(train=\{\.\.\.\}\)"),  # type: ignore[arg-type]
        (lambda: samestep.load(None), "is not the path of a job file"),  # type: ignore[arg-type]
        (lambda: samestep.load("job.toml", "train.steps=3"), "is one setting, and a list is read"),
        (lambda: samestep.plan(Job(), "2"), "Use a whole number, such as devices=2"),  # type: ignore[arg-type]
        (lambda: samestep.latest(None), "Use the path of a file or a folder"),  # type: ignore[arg-type]
        (lambda: samestep.launch(None, ranks=1), "Use a function"),  # type: ignore[arg-type]
        (lambda: _parallelized(model=nn.Linear), "missing a required argument: 'in_features'"),
        (lambda: _parallelized(model=_sharded()), r"the model has sharded weights .*Use it without fully_shard or"),
        (lambda: _parallelized(model=[Model()]), "is a list. Use a function that builds an nn.Module"),
        (lambda: _parallelized(optimizer="adamw"), "is a str. Use a function of the parameters"),
        (lambda: _parallelized(optimizer=lambda: None), "one argument, a list of parameters"),
        (lambda: _stepped(loss=lambda o, b: (o.sum(), -1)), "returned .* a int.. Use .sum, count."),
        (lambda: _stepped(loss=lambda o, b: (o.sum() * 1j, 1)), "of complex numbers"),
        (lambda: _parallelized().evaluate(Points), r"the class Points. Use a data set, such as Points\(\)"),
        (lambda: _parallelized().evaluate(Points(), lambda o, b: o.mean()), "the measure .* returned a tensor"),
        (lambda: _parallelized().evaluate(Points(), lambda o: o), "two arguments"),
        (lambda: _parallelized().load(3), "is an int. Use the path of a file or a folder"),
        (
            lambda: _parallelized(job=Job(optimizer={"lr": 0.5})),
            r"does not read optimizer\.lr of the job\. Use the arguments model",
        ),
        (
            lambda: _parallelized(job=Job(checkpoint={"every": 50}, run={"report": ["wandb"]})),
            r"read checkpoint\.every, run\.report of .* Use `if report\.step .*run\.save\(folder\)`, and the loggers of samestep.track without",
        ),
        (lambda: _parallelized(job=Job(train={"sample_tokens": 5})), r"Remove these keys, or samestep\.train"),
        (lambda: samestep.benchmark_layouts(Job(), "dp=2"), r'is a str. Use a list, such as layouts=\["dp=2"'),
        (lambda: samestep.benchmark_layouts(Job(), samestep.Layout("dp=2")), "is a Layout. Use a list, such as"),  # type: ignore[arg-type]
        (lambda: samestep.calibrate(3), "rows = 3 is an int. Use the path of a file, or a list of paths"),  # type: ignore[arg-type]
        (lambda: samestep.launch(print, 2, ranks=2), r"args = 2 is an int. Use a tuple .* args=\(3,\)"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_kind_are_refused_in_one_line(call: Any, says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_arguments_of_their_kind_are_taken(tmp_path: Path) -> None:
    for given in ({}, {"layout": Layout()}, {"model": Model()}):
        assert _stepped(**given).loss > 0
    assert samestep.latest(tmp_path / "none") is None


@pytest.mark.parametrize(
    "function",
    [
        lambda: samestep.export(None, "out"),
        lambda: samestep.sample(None),
        lambda: samestep.evaluate(None),
        lambda: samestep.explain(None),
        samestep.explain,
    ],
)
def test_none_stands_for_the_newest_run(function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="there is no run below runs/"):
        function()
