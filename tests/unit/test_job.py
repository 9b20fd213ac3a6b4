"""The job: what a file and the settings over it say, every mistake at once, and the file that repeats a run."""

from __future__ import annotations

import pickle
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import samestep
from samestep import Job, JobError, errors, load
from samestep import job_files as jobs
from samestep.building.loss import loss_of
from samestep.datasets import open_dataset
from samestep.wings.plan.simulation.simulate import simulate
from tests import small

DEFAULT = Path(str(resources.files("samestep") / "default_job.toml"))


def _file(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def _mistakes(path: Path, *settings: str) -> list[str]:
    with pytest.raises(JobError) as caught:
        load(path, settings)
    return str(caught.value).splitlines()


def test_the_default_job_of_the_package_is_that_of_the_repository() -> None:
    repository = Path(__file__).parents[2] / "jobs" / "default.toml"
    assert load(DEFAULT) == load(repository)


def test_an_empty_file_is_the_job_of_all_defaults(tmp_path: Path) -> None:
    assert load(_file(tmp_path, "")) == Job()


@pytest.mark.parametrize("path", [DEFAULT, None], ids=["default", "empty"])
def test_what_is_written_reads_as_the_same_job(path: Path | None, tmp_path: Path) -> None:
    groups = [
        {"match": ["*_proj.weight"], "name": "muon"},
        {"match": ["*norm*"], "weight_decay": 0.0},
    ]  # others are None
    deep = {"config": {"deep": {"a": [1, 2.5, "x", True]}}}
    job = load(path) if path else Job(model=deep, optimizer={"groups": groups}, layout={"dp": 2})
    again = load(_file(tmp_path, job.to_toml()))
    assert again == job
    assert again.to_toml() == job.to_toml()


def test_a_written_job_has_every_key() -> None:
    tables = tomllib.loads(load(DEFAULT).to_toml())
    for name, field in Job.model_fields.items():
        keys = getattr(field.annotation, "model_fields", {})
        optional = {key for key, value in keys.items() if value.default is None}
        assert keys.keys() - optional <= tables[name].keys()


def test_a_job_survives_pickling_and_cannot_be_changed() -> None:
    job = load(DEFAULT)
    assert pickle.loads(pickle.dumps(job)) == job
    with pytest.raises(ValueError, match="frozen"):
        job.train.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("train.steps=50", "train.steps", 50),
        ("train.steps = 50", "train.steps", 50),
        ("optimizer.lr=1e-4", "optimizer.lr", 1e-4),
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("data.source=text:/some/where=there", "data.source", "text:/some/where=there"),
        ("data.source='topics'", "data.source", "topics"),
        ("train.prompt=", "train.prompt", ""),
        ("train.prompt=The ", "train.prompt", "The "),
        ("model.config.hidden_size=8", "model.config", {"hidden_size": 8}),
        ("model.config={a=1, b='c'}", "model.config", {"a": 1, "b": "c"}),
        ("optimizer.no_weight_decay=['*bias']", "optimizer.no_weight_decay", ("*bias",)),
        ("numerics.tf32=true", "numerics.tf32", True),
        ("layout.dp=4", "layout", {"dp": 4}),
        # large, but possible
        ("train.seed=9223372036854775807", "train.seed", 2**63 - 1),
        ("train.steps=1e3", "train.steps", 1000),
        ("train.steps=100000000000", "train.steps", 10**11),
        ("train.global_batch=16777216", "train.global_batch", 2**24),
        ("run.timeout_s=86400", "run.timeout_s", 86400.0),
        ("run.threads=192", "run.threads", 192),
        ("run.ranks=16384", "run.ranks", 16384),
        ("optimizer.lr=0", "optimizer.lr", 0.0),
        ("optimizer.lr=1e30", "optimizer.lr", 1e30),
        ("train.prompt='=3'", "train.prompt", "=3"),
        ("model.config.limit=inf", "model.config", {"limit": float("inf")}),
        ("run.allow=['loss', 'samples']", "run.allow", ("loss", "samples")),
    ],
)
def test_a_setting_overrides_a_key(setting: str, key: str, value: Any, tmp_path: Path) -> None:
    found: Any = load(_file(tmp_path, ""), [setting])
    assert Job.model_validate_json(found.model_dump_json()) == found
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_the_last_setting_counts(tmp_path: Path) -> None:
    path = _file(tmp_path, "[train]\nsteps = 9")
    assert load(path).train.steps == 9
    assert load(path, ["train.steps=8", "train.steps=7"]).train.steps == 7
    below = ["--set train.steps.more=3: steps is a value, not a table"]
    assert _mistakes(path, "train.steps=3", "train.steps.more=3") == below


def test_every_mistake_is_said_at_once_with_file_and_key(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        "[train]\nstepz = 3\nglobal_batch = 0\nseed = 'x'\n[optimzer]\nlr = 1\n"
        "[numerics]\nprecision = 'float16'\n[data]\nheld_out = 1.5\n",
    )
    lines = _mistakes(path)
    assert all(line.startswith(f"{path}: ") for line in lines), lines
    told = {line.removeprefix(f"{path}: ").split(": ")[0]: line for line in lines}
    assert told.keys() == {
        "train.stepz", "train.global_batch", "train.seed", "optimzer", "numerics.precision", "data.held_out",
    }  # fmt: skip
    assert "unknown key (did you mean 'steps'?); the keys here are global_batch, steps," in told["train.stepz"]
    assert "unknown key (did you mean 'optimizer'?)" in told["optimzer"]
    assert told["train.global_batch"].endswith("greater than or equal to 1, got 0")
    assert "'float64', 'float32', 'bf16' or 'fp16', got 'float16'" in told["numerics.precision"]
    assert told["data.held_out"].endswith("less than 1, got 1.5")


def test_a_mistake_in_a_setting_names_its_key(tmp_path: Path) -> None:
    path = _file(tmp_path, "[train]\nseed = -1\n")
    told = [line.split(": ")[:2] for line in _mistakes(path, "train.steps=0")]
    assert sorted(told) == sorted([[str(path), "train.seed"], ["--set train.steps=0", "train.steps"]])
    (line,) = _mistakes(_file(tmp_path, ""), "trian.steps=3")
    assert line.startswith("--set trian.steps=3: trian: unknown key (did you mean 'train'?)")


def test_a_mistake_in_python_is_a_job_error() -> None:
    with pytest.raises(JobError, match=r"^job: train\.steps: input should be greater than or equal to 1, got 0$"):
        Job(train={"steps": 0})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[numerics]\nreplicas = 2", "none is. Set replicas = 1"),
        ("[numerics]\ncompression = 'int8'", "Set replicas = 2 or more"),
        ("[numerics]\ncompression = 'fp16'", 'compression = "fp16" was removed in this version; use compression = "bf16"'),
        ("[train]\nrecord_kernels = true", "record_kernels was removed in this version; use run.profile, which writes a trace of the kernels"),
        ("[numerics]\ncompression = 'int8'\nreplicas = 3\n[train]\nglobal_batch = 8", "Set global_batch = 9"),
        ("[numerics]\ncompression = 'int8'\nreplicas = 2\nbatch_norm_group = 4", "Use one of them alone"),
        ("[numerics]\nbatch_norm_group = 3\n[train]\nglobal_batch = 8", "Set batch_norm_group = 2"),
        ("[layout]\ndp_shardd = 2", "layout: unknown layout option 'dp_shardd' (did you mean 'dp_shard'?)"),
        ("[layout]\ndp = 2\ndp_shard = 2", "dp=N sets dp_replicate or dp_shard itself"),
        ("[train]\nsteps = 5\n[schedule]\nwarmup_steps = 6", "schedule.warmup_steps = 6 is more than train.steps = 5"),
    ],
)  # fmt: skip
def test_values_that_contradict_each_other_are_refused(text: str, says: str, tmp_path: Path) -> None:
    (line,) = _mistakes(_file(tmp_path, text))
    assert says in line


def test_files_that_are_none(tmp_path: Path) -> None:
    assert _mistakes(tmp_path / "nope.toml") == [f"no job file at {tmp_path}/nope.toml"]
    path = _file(tmp_path, "[model\n")
    (tmp_path / "pyproject.toml").touch()
    assert _mistakes(tmp_path / "nope.toml") == [f"no job file at {tmp_path}/nope.toml; there are {path}"]
    (empty := tmp_path / "empty").mkdir()
    assert _mistakes(empty) == [f"{empty} is a folder; a job is a TOML file. Use run.load to continue a checkpoint"]
    (tmp_path / "job.toml").touch()
    assert _mistakes(tmp_path)[0].endswith(f"as {tmp_path}/job.toml; `--out {tmp_path} --resume` resumes this run")
    (line,) = _mistakes(path)
    assert line.startswith(f"{path} is not TOML: ")
    assert "line 1" in line
    path.write_bytes(b"\xff\xfe")
    (line,) = _mistakes(path)
    assert line.startswith(f"{path} is not TOML: ")


def test_the_public_load_is_this_one() -> None:
    assert samestep.load is load


# -- numbers out of range --------------------------------------------------------------------------

_TABLES = ("data", "train", "optimizer", "schedule", "numerics", "checkpoint", "run")
NUMERIC = [
    f"{table}.{key}"
    for table in _TABLES
    for key, field in Job.model_fields[table].annotation.model_fields.items()  # type: ignore[union-attr]
    if {int, float} & set(errors.types_in(field.annotation))
]
"""Every key of a job whose value is a number."""
DEGREES = [f"layout.{key}" for key in ("dp", "tp", "pp", "cp", "ep", "zero", "microbatch", "virtual_stages")]
SIZES = [
    f"model.config.{key}" for key in ("layers", "hidden", "heads", "vocab", "sequence", "head_dim", "intermediate")
]
WILD = (
    "0", "-1", "1", "2", "7", "0.5", "1e400", "-1e400", "nan", "1e308", "5e-324", "true", "false", "''", "[]", "{}", "=3",
    "1048577", "16777216", "100000000000", "9223372036854775807", "9223372036854775808", "18446744073709551616",
    "-9223372036854775809", "99999999999999999999", "0x" + "f" * 4000, "9" * 5000, "1979-05-27", "three",
)  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(NUMERIC + DEGREES + SIZES), st.sampled_from(WILD)), min_size=1, max_size=3))
@settings(max_examples=150)
def test_any_number_is_refused_in_one_line_or_planned(given: list[tuple[str, str]]) -> None:
    words = ["model.source=preset:gpt2", "model.config.layers=2", *(f"{key}={value}" for key, value in given)]
    try:
        job = jobs.default(words)
        simulate(job, hardware="h100x8")
    except samestep.InputError:
        return
    assert "inf" not in job.to_toml()
    assert Job.model_validate_json(job.model_dump_json()) == job
    assert load_text(job.to_toml()) == job


@pytest.mark.parametrize(
    ("table", "keys", "says"),
    [
        (samestep.TrainTable, {"stepz": 3}, "TrainTable: stepz: unknown key (did you mean 'steps'?)"),
        (samestep.TrainTable, {"steps": True}, "TrainTable: steps: input should be a number, got True"),
        (samestep.NumericsTable, {"precision": "bfloat"}, "TrainTable: precision: input should be 'float64'"),
        (samestep.OptimizerTable, {"groups": [{"lr": 1}]}, "OptimizerTable: groups.0.match: field required"),
    ],
)
def test_a_table_of_its_own_reports_its_mistakes_as_a_job_does(table: Any, keys: Any, says: str) -> None:
    with pytest.raises(JobError) as refused:
        table(**keys)
    assert str(refused.value).startswith(says.replace("TrainTable", table.__name__))


def test_a_job_takes_tables_that_are_made_before() -> None:
    job = Job(train=samestep.TrainTable(steps=3, record=2), numerics={"precision": "bf16"})
    assert (job.train.steps, job.train.record, job.numerics.precision) == (3, "2", "bf16")
    assert Job.model_validate_json(job.model_dump_json()) == job
    with pytest.raises(JobError, match=r"^job: train: input should be a valid dictionary or instance of TrainTable"):
        Job(train=3)  # type: ignore[arg-type]


def load_text(text: str) -> Job:
    return Job(**tomllib.loads(text))


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("", "--set : write key=value, as in --set train.steps=50"),
        ("=3", "--set =3: write key=value, as in --set train.steps=50"),
        ("train..steps=3", "--set train..steps=3: write key=value, as in --set train.steps=50"),
        ("run.timeout_s=inf", "input should be a finite number, got inf"),
        ("run.timeout_s=1e300", "less than or equal to 100000000, got 1e+300"),
        ("run.threads=100000", "less than or equal to 1024, got 100000"),
        ("train.seed=99999999999999999999", "less than 9223372036854775808, got 99999999999999999999"),
        ("optimizer.weight_decay=true", "input should be a number, got True"),
        ("optimizer.clip_norm=true", "input should be a number, got True"),
        ("optimizer.weight_decay=inf", "input should be a finite number, got inf"),
        ("run.ranks=100000000000", "less than or equal to 1048576, got 100000000000"),
        ("train.steps==3", "one '=' separates key and value"),
        ("layout.dp=99999999999", "must be from 1 to 1048576"),
        ("train.steps=0x" + "f" * 5000, "got a number of thousands of digits"),
    ],
)
def test_a_setting_that_is_none_or_out_of_range_says_what_is(setting: str, says: str, tmp_path: Path) -> None:
    (line,) = _mistakes(_file(tmp_path, ""), setting)
    assert says in line


@pytest.mark.parametrize("text", ["[train]\nsteps = " + "9" * 5000, "[model]\nconfig = " + "[" * 5000])
def test_a_file_that_no_reader_takes_is_said_not_to_be_toml(text: str, tmp_path: Path) -> None:
    (line,) = _mistakes(_file(tmp_path, text))
    assert "is not TOML: " in line


def test_a_short_run_of_the_default_job_has_no_warm_up() -> None:
    assert jobs.default(["train.steps=8"]).schedule.warmup_steps == 0
    assert jobs.default(["train.steps=100"]).schedule.warmup_steps == 50
    assert jobs.default(["train.steps=8", "schedule.warmup_steps=3"]).schedule.warmup_steps == 3
    with pytest.raises(JobError, match=r"Use at most 8, or more steps"):
        jobs.default(["train.steps=8", "schedule.warmup_steps=9"])


@pytest.fixture
def two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A folder with a job file, a text and a module, and another one, in which the process is."""
    own, here = tmp_path / "own", tmp_path / "here"
    for folder, letter in ((own, "a"), (here, "b")):
        (folder / "texts").mkdir(parents=True)
        (folder / "texts" / "one.txt").write_text(letter * 600)
    (own / "only_own.txt").write_text("c" * 600)
    (here / "only_here.txt").write_text("d" * 600)
    (own / f"own_{own.parent.name}.py").write_text("def loss(outputs, batch):\n    return outputs.sum(), 1\n")
    _file(own, "[data]\nsource = 'text:texts/one.txt'\nsequence_length = 16")
    monkeypatch.chdir(here)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    return own, here


@pytest.mark.parametrize(
    ("setting", "letter"),
    [
        ("", "a"),
        ("data.source=text:texts/one.txt", "b"),
        ("data.source='text:texts'", "b"),
        ("data.source=text:only_here.txt", "d"),
        ("data.source=text:only_own.txt", ""),
        ("data.source=text:no.txt", ""),
        ("data.source=text:~nobody_of_this_name/no.txt", ""),
        ("data.source=jsonl:~nobody_of_this_name", ""),
    ],
)
def test_paths_are_relative_to_the_job_file_and_those_of_settings_to_the_working_directory(
    setting: str, letter: str, two_folders: tuple[Path, Path]
) -> None:
    job = load("../own/job.toml", [setting] if setting else [])
    if letter:
        assert set(open_dataset(job)[0]["input_ids"].tolist()) == {ord(letter)}
        return
    with pytest.raises(samestep.DataError, match="there is no"):
        open_dataset(job)


@pytest.mark.parametrize(
    ("source", "letter"), [("text:only_own.txt", "c"), ("text:only_here.txt", "d"), ("text:{here}/texts", "b")]
)
def test_a_path_in_a_job_file_is_found_in_both_folders_and_absolute(source, letter, two_folders):
    own, here = two_folders
    job = load(_file(own, f"[data]\nsource = '{source.format(here=here)}'\nsequence_length = 16"))
    assert set(open_dataset(job)[0]["input_ids"].tolist()) == {ord(letter)}
    assert job == Job(data={"source": source.format(here=here), "sequence_length": 16})


def test_modules_are_found_beside_the_job_file_and_hide_no_installed_ones(two_folders: tuple[Path, Path]) -> None:
    own, _ = two_folders
    word = f"own_{own.parent.name}:loss"
    (own / "colorsys.py").write_text("raise SystemError('the wrong one')")
    assert loss_of(load(_file(own, f"[train]\nloss = '{word}'"))) is not None
    with pytest.raises(JobError, match=rf"neither in {own} nor in "):
        loss_of(load(_file(own, "[train]\nloss = 'no_such_module:loss'")))
    with pytest.raises(JobError, match="module not found: 'own_"):
        loss_of(Job(train={"loss": f"own_{own.parent.name}_again:loss"}))


def test_a_run_is_resumed_and_evaluated_from_another_folder(two_folders, capsys, monkeypatch):
    own, here = two_folders
    words = small.settings(train__steps=2, train__global_batch=4, train__evaluate_samples=4)
    words = [word for word in words if word != "--set"]
    monkeypatch.chdir(own)
    settings = [part for word in words for part in ("--set", word)]
    settings += ["--set", "model.source=hf:llama"]
    assert small.main("train", "job.toml", *settings, "--out", "run", "--layout", "dp=1") == 0
    monkeypatch.chdir(here)
    more = ["--set", "train.steps=2"]
    assert small.main("train", "../own/job.toml", *settings, *more, "--resume", "--out", own / "run") == 0
    capsys.readouterr()
    assert small.main("evaluate", own / "run") == 0
    assert "validation loss" in capsys.readouterr().out
    # A run that was started before there was such a key goes on where it was started.
    job = own / "run" / "job.toml"
    job.write_text("\n".join(line for line in job.read_text().splitlines() if not line.startswith("folder")))
    monkeypatch.chdir(own)
    assert small.main("train", "--resume", "--out", "run") == 0
