"""The command line, as somebody meets it who types it wrong: one line that says what works, exit 2, nothing started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import samestep
from samestep import cli, hardware
from samestep.arguments import spell_out
from samestep.building.optimizer import optimizer_of
from samestep.errors import WorkerError
from samestep.models import catalog
from samestep.models.spec import ModelSpec, from_json, to_json
from samestep.program.update_rules import states_per_param
from samestep.proof import verify as proof
from samestep.proof.verdict import Verdict
from samestep.runtime import memory_limits
from samestep.training import run_folder, train, workload
from samestep.wings.plan import search
from tests import small


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.workers, "run_workers", lambda *_, **__: pytest.fail("workers were started"))


Words = list[str]
MISTAKES: dict[str, tuple[Words, dict[str, Any], str]] = {
    "layout word": (["--layout", "dp_shrad=2"], {}, "unknown layout option 'dp_shrad' (did you mean 'dp_shard'?)"),
    "another framework's word": (["--layout", "fsdp=2"], {}, "unknown layout option 'fsdp': use dp=N zero=3; the options"),
    "ranks": (
        ["--layout", "dp=2 zero=1", "--ranks", "3"],
        {},
        "layout 'dp=2 zero=1' has 2 ranks, not 3. Use --ranks 2, or a layout with degrees that multiply to 3, such as dp=3",
    ),
    "strategy": (["--layout", "dp=2 accumulate=full"], {}, "zero=0 shards none. Use zero=2, zero=3 or accumulate=sharded"),
    "ranks zero": (["--ranks", "0"], {}, "argument --ranks: must be a whole number from 1 to 1048576, got 0"),
    "ranks range": (["--ranks", "4:2"], {}, "argument --ranks: MIN is greater than MAX in 4:2. Use 2:4"),
    "fewer ranks": (["--ranks", "1:2"], {}, "--ranks 1:2 lets a restart continue with fewer ranks, and run.restarts = 0"),
    "half a rendezvous": (["--nodes", "2"], {}, "--rendezvous and --token-file missing: several hosts need --nodes N"),
    "one host": (
        ["--nodes", "1", "--rendezvous", "h:1", "--token-file", "t"],
        {},
        "--nodes 1: --rendezvous needs 2 hosts or more. To run on this host alone, leave it out",
    ),
    "hosts": (["--dry-run", "--nodes", "2", "--layout", "dp=3"], {}, "2 hosts cannot share 3 ranks equally. Use 2 ranks"),
    "flag": (["--layuot", "dp=2"], {}, "unknown argument --layuot (did you mean '--layout'?); see samestep train --help"),
    "a key as a flag": (["--lr", "0.1"], {}, "unknown argument --lr: use --set optimizer.lr=VALUE; see samestep train --help"),
    "a key without its table": (["--set", "lr=0.1"], {}, "--set lr=0.1: lr: unknown key: use optimizer.lr;"),
    "a job behind --allow": (["--allow", "samples", "loss", "nope.toml"], {}, "no job file at nope.toml"),
    "a layout without quotes": (["--layout", "dp=2", "zero=3"], {}, 'use quotes: --layout "dp=2 zero=3"'),
    "a flag of another command": (["--trace", "a"], {}, "unknown argument --trace; see samestep train --help"),
    "recorded steps": (["--record", "5:2"], {}, "train.record: '5:2' ends before it begins. Use FIRST:LAST"),
    "recorded step": (["--record", "first"], {}, "train.record: 'first' names no steps. Use FIRST:LAST"),
    "half a flag": (["--lay", "dp=2"], {}, "unknown argument --lay"),
    "profiled steps": (["--set", "run.profile=12:10"], {}, "run.profile: '12:10' ends before it begins"),
    "a device without groups": (["--set", "run.device=mps"], {}, "no process groups on MPS"),
    "steps": (["--steps", "7"], {}, "--steps 7 is beyond train.steps = 6, where the learning-rate schedule ends. Use --set"),
    "job file": (["nope.toml"], {}, "no job file at nope.toml"),
    "data source": ([], {"data.source": "topicz"}, "unknown data source 'topicz' (did you mean 'topics'?)"),
    "data path": ([], {"data.source": "text:/nope/book.txt"}, "text:/nope/book.txt: there is no folder /nope"),
    "data function": ([], {"data.source": "nope:make"}, "nope:make: module not found: 'nope'"),
    "data length": (
        [],
        {"data.sequence_length": 10**7, "model.config.max_position_embeddings": 10**7},
        "data.sequence_length = 10000000 needs 10000001",
    ),
    "family": ([], {"model.source": "hf:lama"}, "hf:lama: transformers has no family 'lama' (did you mean 'llama'?)"),
    "field": ([], {"model.config.hiden_size": 8}, "hf:llama has no such field (did you mean 'hidden_size'?)"),
    "no model": ([], {"model.source": ""}, "model.source is missing, and a job has no model by default. Use "),
    "model function": (
        [],
        {"model.source": "lama"},
        "model.source = 'lama' is not of the form module:function, hf:FAMILY or hf:PATH (did you mean 'hf:llama'?)",
    ),
    "positions": (
        [],
        {"model.config.max_position_embeddings": 8},
        "samples of 16 tokens are longer than model.config.max_position_embeddings = 8. Set data.sequence_length = 8",
    ),
    "optimizer": ([], {"optimizer.name": "adamx"}, "optimizer.name = 'adamx' must be one of"),
    "optimizer's values": ([], {"optimizer.options.betas": [2, 3]}, "optimizer: AdamW rejects its settings: Invalid beta"),
    "loss": ([], {"train.loss": "cross_entrpy"}, "(did you mean 'cross_entropy'?)"),
    "device": ([], {"run.device": "gpu"}, "run.device: input should be 'auto', 'cpu' or 'cuda', got 'gpu'"),
    "resume nothing": (["--resume"], {}, "there is no run below runs/ to resume. Use --out DIR"),
    "resume nowhere": (["--resume", "--out", "nowhere"], {}, "nowhere holds no run to resume"),
}  # fmt: skip


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("sample --temperature -1", "--temperature: must be a number of at least 0, got -1"),
        ("sample --temperature nan", "--temperature: must be a number of at least 0, got nan"),
        ("doctor --wait 90000", "--wait: must be a number from 0 to 86400, got 90000"),
        ("plan --devices 2 --days-for-tokens 0B", "--days-for-tokens: must be a number greater than 0, such as"),
        ("plan --devices 2 --cost-per-hour inf", "--cost-per-hour: must be a number greater than 0, such as"),
        ("sample --tokens 0", "--tokens: must be a whole number from 1 to"),
    ],
)
def test_a_number_of_a_flag_has_its_range(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"samestep: argument {says}")


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_gets_one_line_and_exit_2(case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words, changes, says = MISTAKES[case]
    assert small.train(*words, **changes) == 2
    said, complaint = capfd.readouterr()
    assert said == ""
    assert says in complaint
    assert complaint.startswith("samestep: ")
    assert complaint.count("\n") == 1, complaint
    assert not list(tmp_path.iterdir())


def test_a_file_may_begin_with_a_byte_order_mark() -> None:
    Path("job.toml").write_text("[train]\nsteps = 7\n", encoding="utf-8-sig")
    assert samestep.load("job.toml").train.steps == 7


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("source", ["jsonl:book.jsonl", "tokens:book.bin"])
def test_tokens_the_model_has_no_embedding_for(source: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("book.jsonl").write_text('{"text": "It was a dark and stormy night."}\n' * 100)
    (np.arange(4000) % 300).astype(np.uint16).tofile("book.bin")
    size = 299 if source.startswith("tokens") else 200
    assert small.train(data__source=source, model__config__vocab_size=size) == 2
    works = 300 if source.startswith("tokens") else 256
    assert f"model.config.vocab_size = {size}. Use vocab_size = {works}" in capfd.readouterr().err


@pytest.mark.parametrize("verb", ["train", "simulate", "layouts"])
def test_a_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert small.main(verb, "--help") == 0
    assert f"usage: samestep {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("trian", "COMMAND: must be one of train, verify, launch"),
        ("trian", "got 'trian' (did you mean 'train'?); see samestep --help"),
        ("train --allow sampels", "got 'sampels' (did you mean 'samples'?)"),
        ("launch a.py --device cdua", "--device: must be one of auto, cpu, cuda, got 'cdua' (did you mean 'cuda'?)"),
        ("export --out a --format safetensor", "(did you mean 'safetensors'?)"),
        ("export --out a --dtype int3", "--dtype: must be one of float64, float32, bf16, fp16, got 'int3';"),
    ],
)
def test_a_word_that_is_no_choice(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert small.main(*words.split()) == 2
    assert says in capsys.readouterr().err


def test_no_command_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert small.main() == 0
    assert capsys.readouterr().out.startswith("usage: samestep")


def _warnings_of(*words: str, monkeypatch: pytest.MonkeyPatch, cores: int, **changes: Any) -> list[str]:
    """The warnings of a run that is not started."""
    monkeypatch.setattr(train.workers, "run_workers", lambda *_, **__: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        monkeypatch.setattr(cli, "_say_warning", warnings.showwarning)
        assert cli.main(["train", *small.settings(**changes), *words]) == 0
    return [str(warning.message) for warning in caught]


def test_what_has_no_effect_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _warnings_of("--layout", "dp=2 offload", monkeypatch=monkeypatch, cores=8)
    assert found == [
        "offload moves the optimizer's state to CPU memory; on a CPU it is there already, so nothing is saved"
    ]


def test_more_threads_than_cores_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _warnings_of("--ranks", "4", monkeypatch=monkeypatch, cores=4) == []
    found = _warnings_of("--ranks", "4", monkeypatch=monkeypatch, cores=2)
    assert found == ["4 ranks share 2 cores: times will be longer than they need be"]
    found = _warnings_of("--ranks", "2", monkeypatch=monkeypatch, cores=3, run__threads=2)
    assert found == ["2 ranks of 2 threads share 3 cores: times will be longer than they need be"]


def test_a_warning_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    cli._say_warning(UserWarning("mind the gap"), UserWarning, "file.py", 3)
    cli._say_warning(DeprecationWarning("for developers"), DeprecationWarning, "file.py", 3)
    assert capsys.readouterr().err == "samestep: warning: mind the gap\n"


def test_runs_of_one_second_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "20300101-000000")
    for _ in range(2):
        assert small.train("--ranks", "1", data__held_out=0.0, train__evaluate_samples=8, train__steps=2) == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["20300101-000000", "20300101-000000-2"]
    summary = json.loads(Path("runs/20300101-000000/summary.json").read_text())
    assert summary["held_out_loss"] is None, "nothing held out is nothing evaluated"


@pytest.mark.parametrize(("verb", "words"), [("run", "dp=2"), ("dry run", "dp=2 zero=3")])
def test_a_run_that_needs_far_more_memory_than_there_is_is_not_started(verb, words, tmp_path, monkeypatch, capfd):
    needs: list[int] = []

    def peak(*args: Any) -> Any:
        use = predicted(*args)
        needs.append(use.total)
        return use

    predicted = memory_limits.predicted_peak
    monkeypatch.setattr(memory_limits, "predicted_peak", peak)
    given = ["--layout", words, *(["--dry-run"] if verb == "dry run" else ["--out", str(tmp_path / "run")])]
    monkeypatch.setattr(memory_limits, "limit_bytes", lambda _: 1000)
    assert small.train(*given) == 2
    said = small.without_code(capfd.readouterr().err)
    assert re.match(
        rf'samestep: layout "{words}" is predicted to need .* a rank at .* \(weights .*\), and there are 500 B', said
    )
    assert said.endswith('run.allow = ["memory"] lets it run unproven\n')
    assert not (tmp_path / "run").exists()
    if verb == "dry run":
        assert small.train(*given, "--allow", "memory") == 0
        monkeypatch.setattr(
            memory_limits, "limit_bytes", lambda _: 2 * int(needs[0] / 1.4)
        )  # a little too much may fit
        assert small.train(*given) == 0


# -- a dry run -------------------------------------------------------------------------------------


def _dry(words: Words, capfd: pytest.CaptureFixture[str], **changes: Any) -> tuple[samestep.Job, list[str]]:
    assert small.train("--dry-run", *words, **changes) == 0
    said = capfd.readouterr().out
    summary, _, toml = said.partition("\n\n")
    Path("dry.toml").write_text(toml)
    heading, *lines = summary.splitlines()
    assert heading.startswith("job: built-in default, changed by --set: ")
    return samestep.load("dry.toml"), lines


@pytest.mark.usefixtures("nothing_starts")
def test_a_dry_run_says_what_would_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job, (head, *ranks) = _dry(["--layout", "dp=2 zero=1 microbatch=2"], capfd)
    assert [path.name for path in tmp_path.iterdir()] == ["dry.toml"], "which is this test's"
    assert job.train.steps == 6
    assert len(Path("dry.toml").read_text().splitlines()) < 60, "keys with their default are left out"
    assert job.layout == {"dp_replicate": 1, "dp_shard": 2, "zero": 1, "microbatch": 2}
    assert head == 'layout "dp=2 zero=1 microbatch=2": 2 ranks, 2 micro-batches of at most 2 samples'
    spec = catalog.model_spec(job)
    whole = spec.num_params * 4
    samples = []
    for rank, line in enumerate(ranks):
        found = re.fullmatch(
            rf"rank {rank}: weights ([\d,]+) B, gradients ([\d,]+) B, optimizer ([\d,]+) B; samples of step 1: ([\d ]+)",
            line,
        )
        assert found, line
        weights, gradients, optimizer = (int(number.replace(",", "")) for number in found.groups()[:3])
        assert weights == gradients >= whole
        assert optimizer == pytest.approx(whole, rel=0.01), "two moments, cut in two"
        samples += [int(index) for index in found[4].split()]
    dataset = samestep.datasets.open_dataset(job)
    assert samples == next(iter(samestep.batches(dataset, job))).indices.tolist()


@pytest.mark.usefixtures("nothing_starts")
def test_a_dry_run_refuses_what_the_run_would(capfd: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/job.toml").touch()
    assert small.train("--dry-run", "--out", "run") == 2
    assert "run holds a run already" in capfd.readouterr().err
    assert small.train("--dry-run", "--layout", "dp=2 reduce=root zero=1") == 2
    assert "use it with zero=0, not zero=1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adadelta", {}), ("adafactor", {}), ("adagrad", {}), ("adam", {}), ("adam", {"amsgrad": True}), ("adamax", {}),
        ("adamw", {}), ("adamw", {"amsgrad": True}), ("asgd", {}), ("muon", {}), ("nadam", {}), ("radam", {}),
        ("rmsprop", {}), ("rmsprop", {"momentum": 0.9}), ("rmsprop", {"momentum": 0.9, "centered": True}),
        ("rprop", {}), ("sgd", {}), ("sgd", {"momentum": 0.9}),
    ],
)  # fmt: skip
def test_the_states_of_an_optimizer_are_those_that_torch_keeps(name: str, options: dict[str, Any]) -> None:
    job = samestep.Job(optimizer={"name": name, "options": options})
    param = torch.nn.Parameter(torch.ones(6, 4))
    optimizer = optimizer_of(job)([("weight", param)])
    param.grad = torch.ones(6, 4)
    optimizer.step()
    kept = [value for value in optimizer.state[param].values() if isinstance(value, torch.Tensor)]
    assert states_per_param(job) == sum(value.shape == param.shape for value in kept)


# -- simulate and the catalog ----------------------------------------------------------------------


_TRACED: list[ModelSpec] = []


def _small_spec(job: samestep.Job) -> ModelSpec:
    """The trace of the small job, which is traced once."""
    if not _TRACED:
        _TRACED.append(workload.trace_job(job).spec)
    return _TRACED[0]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setenv("HOME", str(path))
    return path


def _simulate(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `samestep simulate` in a new process; its last line of stderr tells whether torch was imported."""
    code = (
        "import sys; from samestep.cli import main; status = main(sys.argv[1:]);"
        "print('torch' in sys.modules or 'transformers' in sys.modules, file=sys.stderr); sys.exit(status)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "simulate", *small.settings(), *words], capture_output=True, text=True, timeout=500
    )


def test_simulate_traces_once_and_never_imports_torch(home, monkeypatch, capfd):
    words = ["--layout", "dp=2 zero=3", "--json", "numbers.json", "--trace", "trace.json"]
    first = _simulate(*words)
    *waits, imported = first.stderr.splitlines()
    assert (first.returncode, imported) == (0, "False"), first.stderr
    assert all("tracing hf:llama" in line for line in waits)  # a busy machine says so
    (spec,) = (home / ".cache" / "samestep" / "specs").iterdir()
    spec.write_text(spec.read_text().replace("hf:llama", "from the cache"))
    monkeypatch.setattr(catalog, "_trace_elsewhere", lambda _: pytest.fail("a model was traced again"))
    assert small.main("simulate", *small.settings(), *words) == 0
    assert capfd.readouterr().out == first.stdout
    assert 'program of "dp=2 zero=3": F.only[0] B.only[0] U[0]' in first.stdout
    assert "all_gather:" in first.stdout
    assert "(by FSDP2)" in first.stdout
    numbers = json.loads(Path("numbers.json").read_text())
    assert numbers["devices"] == 2
    assert numbers["step_s"] > 0
    assert json.loads(Path("trace.json").read_text())


def _said_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    model = ("model.source=preset:llama2-7b", "numerics.precision=bf16", "train.global_batch=32")
    model = tuple(word for setting in model for word in ("--set", setting))
    assert small.main("simulate", *model, "--hardware", "h100x8", *words) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading == f"job: built-in default, changed by --set: {', '.join(model[1:5:2])}, 1 more"
    return lines


def test_a_long_program_is_told_by_its_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--layout", "dp=2 pp=4 zero=1 microbatch=1")
    said = _said_of(capsys, *words)
    assert len(said) <= 82
    assert said.pop(0) == "preset:llama2-7b on 8 devices of h100x8"
    first = next(index for index, line in enumerate(said) if line.startswith("program of "))
    assert re.fullmatch(r'program of "dp=2 pp=4 zero=1 microbatch=1": [\d,]+ ops; --program lists them', said[first])
    heads = said[first + 1 :]
    assert [line for line in heads if line.startswith("stage")] == ["stage 0", "stages 1 to 2, each", "stage 3"]
    told = sum(
        (2 if part == 1 else 1) * (1 if times == "once" else int(times.split()[0])) * int(count)
        for part, lines in enumerate("\n".join(heads).split("stage")[1:])
        for times, counts in re.findall(r" (once|\d+ times): (.+)", lines)
        for count in re.findall(r"(\d+) [a-z]", counts)
    )
    assert f" {told:,} ops" in said[first]
    whole = _said_of(capsys, *words, "--program")
    assert len(whole) > len(said)
    assert "    forward:model.layers.31" in "\n".join(whole)
    assert whole[1 : first + 1] == said[:first]


def test_simulate_says_first_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    for words, fits in (("dp=8", False), ("dp=8 zero=3 microbatch=1", True)):
        said = _said_of(capsys, "--layout", words)
        assert said[1].startswith(f'"{words}" {"fits" if fits else "does not fit"}: needs ')
        assert "optimizer" in said[1]
        assert not any(line.startswith(("{", "[")) for line in said), "data is for --json"


@pytest.mark.parametrize("state", ["damaged", "unreadable"])
def test_a_bad_cache_costs_time_and_nothing_else(state, home, monkeypatch, capfd):
    traced: list[samestep.Job] = []

    def trace(job: samestep.Job) -> str:
        traced.append(job)
        return to_json(_small_spec(job))

    monkeypatch.setattr(catalog, "_trace_elsewhere", trace)
    if state == "unreadable":
        (home / ".cache").write_text("a file where a folder should be")
    for _ in range(2):
        assert small.main("simulate", *small.settings(), "--layout", "dp=2") == 0
        for spec in home.glob(".cache/samestep/specs/*"):
            spec.write_text('{"format_version": 1}')
    assert len(traced) == 2


def test_a_spec_needs_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.toml").write_text("[data]\nsource = 'text:/nope/book.txt'\n")
    small_ones = [word for word in small.settings() if word.startswith("model.config.")]
    workload.write_spec(samestep.load("job.toml", ["model.source=hf:llama", *small_ones]).model_dump_json())
    assert from_json(capsys.readouterr().out).name == "hf:llama"


class _Tracing:
    """A process that traces a model, as a fork of this one: a new one would import torch for 3 s."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.returncode = 0

    def __enter__(self) -> _Tracing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def communicate(self, job: str) -> tuple[str, str]:
        def trace() -> int:
            warnings.resetwarnings()
            try:
                workload.write_spec(job)
            except SystemExit as end:
                return int(end.code or 0)
            return 0

        self.returncode = small.status_of(small.forked(trace, Path("traced")), 500.0)
        return Path("traced/out").read_text(), Path("traced/err").read_text()


def test_simulate_tells_the_mistake_that_train_would(home, monkeypatch, capfd):
    monkeypatch.setattr(catalog.subprocess, "Popen", _Tracing)
    Path("mine.py").write_text("import warnings\nprint('hello')\nwarnings.warn('careful')\ndef build(): return 3\n")
    assert small.main("simulate", *small.settings(model__source="mine:build", model__config={})) == 2
    said = capfd.readouterr().err.splitlines()
    assert said[-1] == "samestep: mine:build returned a int; it must return an nn.Module [build-function]"
    assert all("tracing mine:build" in line for line in said[:-1])  # a busy machine says so
    assert not (home / ".cache").exists(), "a user's own code may change at any time"


def test_a_talkative_model_is_traced(capsys: pytest.CaptureFixture[str]) -> None:
    Path("loud.py").write_text(
        "import torch\nprint('hello')\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.embed = torch.nn.Embedding(256, 8); self.head = torch.nn.Linear(8, 256)\n"
        "    def forward(self, input_ids):\n"
        "        print('forward'); return self.head(self.embed(input_ids))\n"
        "def build(): print('building'); return Model()\n"
    )
    workload.write_spec(samestep.Job(model={"source": "loud:build"}).model_dump_json())
    said, complaints = capsys.readouterr()
    assert from_json(said).num_params == 256 * 8 + 8 * 256 + 256
    assert "building" in complaints


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--hardware", "h100"], "no hardware 'h100' (did you mean 'h100x8'?)"),
        (["--devices", "3", "--layout", "dp=2"], "--devices 3, but layout 'dp=2' has 2 ranks"),
    ],
)
def test_mistakes_of_simulate(words, says, monkeypatch, capfd):
    monkeypatch.setattr(catalog, "model_spec", _small_spec)
    assert small.main("simulate", *small.settings(), *words) == 2
    complaint = capfd.readouterr().err
    assert says in complaint
    assert complaint.count("\n") == 1


@pytest.mark.parametrize("flag", ["--json", "--trace", "--html", "--to-file"])
def test_what_cannot_be_written_is_said_before_any_work(flag, monkeypatch, capsys):
    monkeypatch.setattr(catalog, "model_spec", lambda _: pytest.fail("a model was traced"))
    Path("folder").mkdir()
    for file, why in (("nope/x.json", "there is no folder nope"), ("folder", "it is a folder")):
        assert small.main("simulate", flag, file) == 2
        assert capsys.readouterr().err.startswith(f"samestep: {file} cannot be written: {why} [output-unwritable]")


def test_layouts_writes_its_table_or_says_why_not(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(catalog, "model_spec", _small_spec)
    words = ("layouts", *small.settings(), "--devices", "2", "--json")
    assert small.main(*words, tmp_path / "table.json") == 0
    assert {row["legal"] for row in json.loads((tmp_path / "table.json").read_text())} == {True}
    assert small.main(*words, "/nope/table.json") == 2
    assert "/nope/table.json cannot be written: there is no folder /nope" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("layout", "devices", "says"),
    [
        ("dp=2", "--devices 2", '"dp=2" is valid'),
        ("dp=3", "--devices 2", "--devices 2, but layout 'dp=3' has 3 ranks; there it is valid"),
        ("tp=3", "", "tp=3 does not divide the 4 heads"),
    ],
)
def test_layouts_answers_for_one(layout, devices, says, monkeypatch, capfd):
    monkeypatch.setattr(catalog, "model_spec", _small_spec)
    assert small.main("layouts", *small.settings(), *devices.split(), "--why-not", layout) == 0
    heading, said = capfd.readouterr().out.splitlines()
    assert heading.startswith("job: built-in default, changed by --set: model.config.hidden_size=16, ")
    assert said.startswith(says)


def test_layouts_of_no_number_of_devices_says_what_works(capfd):
    assert small.main("layouts", *small.settings()) == 2
    assert "layouts needs a number of devices. Use --devices 4, or --why-not LAYOUT" in capfd.readouterr().err


EXPERTS = ("--set", "model.source=preset:mixtral-8x7b", "--set", "model.config.layers=2")


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_verify_all_tries_what_layouts_lists_as_legal_and_plan_considers_no_other_degrees(
    devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*EXPERTS, "--devices", str(devices))
    assert small.main("layouts", *words, "--switches", "--json", tmp_path / "table.json") == 0
    listed = [row["layout"] for row in json.loads((tmp_path / "table.json").read_text()) if row["legal"]]

    tried: list[str] = []

    def verify(job: samestep.Job, *, layout: samestep.Layout, **_: Any) -> Verdict:
        tried.append(str(layout))
        return Verdict(layout=str(layout), job="", steps=1, precision="float64", checks=())

    monkeypatch.setattr(proof, "verify", verify)
    assert small.main("verify", *words, "--all") == 0
    assert tried == listed

    job = samestep.Job(model={"source": "preset:mixtral-8x7b", "config": {"layers": 2}})
    found = search.plan(catalog.model_spec(job), job, hardware.load("h100x8"), devices)
    possible = [one.layout for one in (*found.best, *found.rejections) if getattr(one, "rule", "") != "refused"]
    layouts = map(samestep.Layout, listed)
    assert {_degrees(one) for one in possible} == {_degrees(one) for one in layouts}


def _degrees(layout: samestep.Layout) -> tuple[int, ...]:
    return layout.tp, layout.pp, layout.cp, layout.ep


def test_who_stops_reading_stops_the_writing() -> None:
    code = "import samestep.cli as cli; cli._env = lambda _: cli.Result(None, 'x' * 10**6); raise SystemExit(cli.main(['env']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=500)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here is always full")
@pytest.mark.parametrize("words", [["presets"], ["presets", "--json"]], ids=["text", "json"])
def test_an_output_that_cannot_be_written_is_one_line(words: list[str], tmp_path: Path) -> None:
    def command() -> int:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        return cli.main(words)

    status = small.status_of(small.forked(command, tmp_path / "said"), 500.0)
    complaint = "samestep: standard output cannot be written: No space left on device\n"
    assert (status, (tmp_path / "said" / "err").read_text()) == (1, complaint)


def test_a_terminal_gets_its_cursor_back(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli._fail(cli.VerbFailure(WorkerError("worker-error", "a worker died"), 1)) == 1
    said, complaint = capsys.readouterr()
    assert said == "\x1b[?25h"
    assert complaint == "samestep: a worker died [worker-error]\n"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (["--emit", "fsdp"], ["--to", "fsdp"]),
        (["--emit=fsdp"], ["--to=fsdp"]),
        (["--emit-file", "a.toml"], ["--to-file", "a.toml"]),
    ],
)
def test_a_flag_of_the_last_release_is_the_new_one(before: list[str], now: list[str]) -> None:
    assert spell_out(["plan", *before]) == ["plan", *now]
