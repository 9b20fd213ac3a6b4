"""Scripts for engines: what each says, what is refused, and that a shell reads every one of them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import samestep
from samestep import cli
from samestep.errors import InputError, RunError
from samestep.runtime.processes.rank_variables import ON_HOSTS
from samestep.wings.cluster.engines import scripts
from samestep.wings.cluster.engines.launch_request import LaunchRequest, Site, read_site, wanted_of
from samestep.wings.cluster.engines.scripts import _literal
from samestep.wings.cluster.hosts import ssh


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _site(text: str) -> Path:
    path = Path("site.toml")
    path.write_text(text)
    return path


def _script(on: str, site: str = "", **given_: Any) -> str:
    asked: dict[str, Any] = {"nodes": "h1,h2", "layout": "dp=8 tp=2"} | given_
    return scripts.engine_of(on).script(wanted_of(None, **asked, site=read_site(_site(site))))


def _options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_slurm_with_tasks_for_ranks() -> None:
    text = _script("slurm", '[slurm]\npartition = "gpu"\ngpus_per_node = 8\noptions = ["--exclusive"]\n')
    assert {"--nodes=2", "--ntasks-per-node=8", "--partition=gpu", "--gpus-per-node=8"} < {*_options(text)}
    assert {"--exclusive", "--requeue", "--open-mode=append", "--signal=TERM@120"} < {*_options(text)}
    assert "srun --kill-on-bad-exit=1 samestep train --layout 'dp=8 tp=2' --out runs/default --auto-resume" in text
    assert '&& scontrol requeue "$SLURM_JOB_ID"' in text


def test_slurm_with_an_agent_on_each_node_is_signalled_through_the_script() -> None:
    text = _script("slurm", '[slurm]\nby = "torchrun"\nsignal_s = 200\n')
    assert {"--ntasks-per-node=1", "--signal=B:TERM@200"} < {*_options(text)}
    assert "--nnodes=2 --nproc-per-node=8" in text
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=180" in text
    assert 'scancel --signal=TERM "$SLURM_JOB_ID"' in text


SAVES = "mkdir -p runs/default && date +%N > runs/default/summary.json; exit 143"


@pytest.mark.parametrize(
    ("by", "srun", "state", "requeues"),
    [
        ("srun", "exit 0", "RUNNING", 0),
        ("srun", "exit 2", "RUNNING", 0),
        ("srun", SAVES, "RUNNING", 6),  # a run that was stopped and has saved goes on, however often
        ("srun", SAVES, "CANCELLED", 0),
        ("srun", "exit 1", "RUNNING", 3),  # a lost rank, or a job that always fails
        ("srun", "exit 137", "RUNNING", 3),
        ("srun", "exit 143", "RUNNING", 3),  # ended by srun, since another task had failed
        ("srun", "exit 1", "CANCELLED", 0),
        ("torchrun", "exit 0", "RUNNING", 0),
        ("torchrun", "exit 1", "RUNNING", 3),
        ("torchrun", "kill -TERM $PPID; sleep 0.2; exit 1", "RUNNING", 6),
    ],
)
def test_a_slurm_script_goes_on_after_a_stop_and_a_few_failures(by, srun, state, requeues, tmp_path):
    """The script with stand-ins for srun and scontrol, run six times, as Slurm would at each start of the job."""
    text = _script("slurm", f'[slurm]\nby = "{by}"\n', nodes=1, layout="dp=2")
    shown = (
        f'case "$1 $2" in "requeue 7") echo . >> requeues ;; "show job") echo JobState={state} ;; *) echo h1 ;; esac'
    )
    for name, lines in {"srun": srun, "scontrol": shown, "scancel": "exit 0"}.items():
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x"}
    for _ in range(6):
        subprocess.run(["bash"], input=text, text=True, env={**variables, "SLURM_JOB_NODELIST": "h1"}, check=False)
    assert (Path("requeues").read_text().count(".") if Path("requeues").exists() else 0) == requeues


def test_mpirun() -> None:
    text = _script("mpi", '[run.environment]\nNCCL_DEBUG = "INFO"\n')
    assert "MASTER_ADDR=$(mpirun --host h1:8,h2:8 -n 1 hostname)" in text
    assert "-n 16 --map-by ppr:8:node --bind-to none -x MASTER_ADDR -x MASTER_PORT -x NCCL_DEBUG" in text
    assert "mpiexec.hydra -hosts h1,h2 -ppn 8 -n 16" in _script("mpi", '[mpi]\nby = "mpich"\n')
    assert "MASTER_ADDR=127.0.0.1" in _script("mpi", nodes=1)


def test_ssh_and_torchrun() -> None:
    assert "--nodes h1,h2" in _script("ssh")
    assert "--rdzv-endpoint=h1:29400" in _script("torchrun")
    assert "--standalone" in _script("torchrun", nodes=1)
    assert "--rdzv-endpoint=a:1" in _script("torchrun", '[torchrun]\nendpoint = "a:1"\n', nodes=2)


@pytest.mark.usefixtures("stop_signals")
def test_hosts_of_ssh_get_the_setup_and_the_variables_of_the_site(tmp_path, monkeypatch):
    values = {"A": "x 'y' $Z", "B": '"`id`\\', "C": "two\nlines", "D": ""}
    texts = "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
    text = _script("ssh", f"[run]\nsetup = [\"S='of setup'; export S\"]\n[run.environment]\n{texts}")
    shown = subprocess.run(
        ["bash", "-c", text.replace("exec ", "env -0 # ")], capture_output=True, text=True, check=True
    )
    exported = dict(one.split("=", 1) for one in shown.stdout.split("\0") if "=" in one)
    stand_in = tmp_path / "stand-in"  # of Python on the hosts
    stand_in.write_text(f'#!/bin/bash\nread token\nenv -0 > "$(mktemp {tmp_path}/host-XXXX)"\n')
    (tmp_path / "ssh").write_text('#!/bin/bash\nexec env -i PATH=/usr/bin:/bin sh -c "${@: -1}"\n')
    for program in (stand_in, tmp_path / "ssh"):
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv(ON_HOSTS, exported[ON_HOSTS])
    monkeypatch.setattr("sys.executable", str(stand_in))
    assert ssh.start(["h1", "h2"], None, ["train"]) == 0
    found = [path.read_text().split("\0") for path in tmp_path.glob("host-*")]
    assert len(found) == 2
    for host in found:
        assert {f"{name}={value}" for name, value in (values | {"S": "of setup"}).items()} < {*host}


def test_ray() -> None:
    text = _script("ray", '[ray]\naddress = "http://a b"\n[run.environment]\nA = "x \'y\' $Z"\n')
    words = shlex.split(next(line for line in text.splitlines() if line.startswith("exec ")).rstrip("\\"))
    assert json.loads(words[words.index("--runtime-env-json") + 1]) == {"env_vars": {"A": "x 'y' $Z"}}
    assert words[words.index("--address") + 1] == "http://a b"
    assert "samestep.wings.cluster.engines.ray_job --layout 'dp=8 tp=2' --ranks 16 --out runs/default" in _script("ray")


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)


@given(st.sampled_from(["slurm", "mpi", "ssh", "torchrun", "ray"]), texts, texts, st.integers(1, 3), st.booleans())
def test_a_shell_reads_every_script_and_passes_every_word_on(on, setting, out, nodes, other):
    hosts = tuple(f"h{index}" for index in range(nodes + 1))
    table = {"slurm": {"by": "torchrun"}, "mpi": {"by": "mpich"}}.get(on, {}) if other else {}
    made = Site()
    site = Site(**{on: type(getattr(made, on))(**table)})
    wanted = LaunchRequest("x", "", len(hosts), 2, "dp=4", out or "run", (setting,), hosts, site)
    text = scripts.engine_of(on).script(wanted)
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert shlex.join(["--set", setting]) in text
    assert shlex.quote(out or "run") in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--on", "slrum"], "--on slrum (did you mean 'slurm'?). Use slurm, kubernetes, ray"),
        (["--on", "slrum", "--layout", "dp=2"], "--on slrum (did you mean 'slurm'?). Use slurm, kubernetes, ray"),
        (["--on", "slurm"], "--ranks-per-node missing"),
        (["--on", "slurm", "--nodes", "2", "--layout", "dp=3"], "2 nodes cannot share the 3 ranks of 'dp=3' equally. Use 2"),
        (["--on", "slurm", "--nodes", "2", "--ranks-per-node", "4", "--layout", "dp=4"], "has 4 ranks, and 2 nodes of 4"),
        (["--on", "slurm", "--nodes", "a,a", "--layout", "dp=2"], "--nodes a,a. Use a number, or names of hosts"),
        (["--on", "slurm", "--nodes", "0", "--layout", "dp=2"], "--nodes 0. Use at least one node"),
        (["--on", "kubernetes", "--layout", "dp=2"], 'Set image = "..." in [kubernetes] of --cluster'),
        (["--on", "ssh", "--nodes", "2", "--layout", "dp=2"], "--on ssh needs the names of two hosts or more"),
        (["--on", "torchrun", "--nodes", "2", "--layout", "dp=2"], "with several nodes needs an address"),
        (["--on", "slurm", "--layout", "dp=2", "--cluster", "no.toml"], "--cluster no.toml: No such file or directory"),
        (["nope.toml", "--on", "slurm", "--layout", "dp=2"], "no job file at nope.toml"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["submit", *words, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1
    assert not any(Path().iterdir())


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ("[slrum]\n", "--cluster site.toml: slrum: unknown key (did you mean 'slurm'?); the keys here are run, slurm"),
        ('[slurm]\npartion = "x"\n', "slurm.partion: unknown key (did you mean 'partition'?)"),
        ("[slurm]\ntime = 60\n", "slurm.time: input should be a valid string, got 60"),
        ('[slurm]\ngpus_per_node = "8"\n', "slurm.gpus_per_node: input should be a valid integer, got '8'"),
        ("[slurm]\ngpus_per_node = -1\n", "slurm.gpus_per_node: must be 0 or more, got -1"),
        ("[slurm]\ngpus_per_node = true\n", "slurm.gpus_per_node: input should be a number, got True"),
        ('[slurm]\nby = "mpirun"\n', "slurm.by: input should be 'srun' or 'torchrun', got 'mpirun'"),
        ('[slurm]\noptions = "--exclusive"\n', "slurm.options: input should be a list, got '--exclusive'"),
        ('[slurm]\npartition = "a\\nrm -r x"\n', "slurm.partition: 'a\\nrm -r x' has more than one line"),
        ("slurm = 3\n", "slurm: input should be a valid dictionary"),
        ("[slurm\n", "--cluster site.toml: "),
        ('[run.environment]\n"A; ls" = "1"\n', "run.environment.A; ls.[key]: string should match pattern"),
        ("[run.environment]\nA = 1\n", "run.environment.A: input should be a valid string, got 1"),
    ],
)  # fmt: skip
def test_a_site_with_a_mistake_is_refused_by_its_key(toml: str, text: str) -> None:
    with pytest.raises(InputError) as caught:
        read_site(_site(toml))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_is_submitted_unless_it_is_asked_for(monkeypatch, capsys, tmp_path):
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "sbatch").write_text('#!/bin/sh\ncp "$1" handed\n')
    (bin_ / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:/usr/bin:/bin")
    words = ["submit", "--on", "slurm", "--layout", "dp=2"]
    assert cli.main([*words, "--write", "a.sbatch"]) == 0
    assert capsys.readouterr().out == Path("a.sbatch").read_text()
    assert not Path("handed").exists()
    assert cli.main([*words, "--dry-run"]) == 0
    assert not Path("handed").exists()
    assert cli.main(words) == 0
    assert Path("handed").read_text() == Path("default.sbatch").read_text() == Path("a.sbatch").read_text()
    (bin_ / "sbatch").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(RunError, match=r"sbatch a\.sbatch ended with status 3"):
        scripts.submit_script("slurm", Path("a.sbatch"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="submit runs sbatch, which is not on this machine"):
        scripts.submit_script("slurm", Path("a.sbatch"))


def test_the_function_takes_a_job_or_its_path() -> None:
    job = samestep.Job(train={"steps": 2})
    text = samestep.write_submission(job, "slurm", nodes=2, ranks_per_node=4, path="run.sbatch")
    assert "train run.toml --layout dp=8" in text
    assert Path("run.sbatch").read_text() == text
    assert samestep.load("run.toml").train.steps == 2
    same = samestep.write_submission("run.toml", "slurm", nodes=2, ranks_per_node=4, out="runs/run")
    assert same.splitlines()[1:] == text.splitlines()[1:]
    with pytest.raises(InputError, match=r'Use path="run\.sbatch"'):
        samestep.write_submission(job, "slurm", nodes=2, ranks_per_node=4)
    with pytest.raises(InputError, match=r"Use a samestep\.Job, or the path of a job file"):
        samestep.write_submission(print, "slurm")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"write_submission\(job, on\) writes the script"):
        samestep.launch(job, ranks=2)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="Use ranks=2"):
        samestep.launch(print)


# ---------------------------------------------------------------- Kubernetes


KINDS = {
    "Job": '[kubernetes]\nimage = "example/train:1"\ngpus_per_node = 8\nclaim = "shared"\n[run.environment]\nA = "yes"\n',
    "a small Job": '[kubernetes]\nimage = "example/train:1"\n',
    "a Job with a shell": '[run]\nsetup = ["echo : # not yaml"]\n[kubernetes]\nimage = "i"\nnamespace = "n"\n',
    "TrainJob": '[kubernetes]\nkind = "TrainJob"\nimage = "example/train:1"\ngpus_per_node = 8\nclaim = "shared"\n',
    "a small TrainJob": '[kubernetes]\nkind = "TrainJob"\nimage = "example/train:1"\n[run.environment]\nA = "1"\n',
}


def _has(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) for module in modules)


@pytest.mark.skipif(not _has("kubernetes_validate", "yaml"), reason="kubernetes-validate is not installed")
@pytest.mark.parametrize("kind", ["Job", "a small Job", "a Job with a shell"])
def test_a_job_is_one_by_the_schemas_of_kubernetes(kind: str) -> None:
    import kubernetes_validate
    import yaml

    job, service = yaml.safe_load_all(_script("kubernetes", KINDS[kind]))
    for document in (job, service):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    names = {one["name"]: one["value"] for one in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert names["PET_MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["backoffLimit"] == 2 * 10, "each of two hosts fails with the run, which may fail ten times"
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    del job["spec"]["completionMode"]
    job["spec"]["completionMod"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.skipif(not _has("kubeflow_trainer_api", "yaml"), reason="kubeflow-trainer-api is not installed")
@pytest.mark.parametrize("kind", ["TrainJob", "a small TrainJob"])
def test_a_train_job_is_one_by_the_trainers_own_models(kind: str) -> None:
    import yaml
    from kubeflow_trainer_api import models

    job = yaml.safe_load(_script("kubernetes", KINDS[kind]))
    read = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert read is not None
    assert read.to_dict() == job, "the models ignore keys that they do not know"


@pytest.mark.parametrize("name", ["7b", "x" * 39 + " y", "-a-", "Ä", "My Job's", "a_b.c"])
def test_a_name_is_one_that_kubernetes_takes(name: str) -> None:
    found = wanted_of(None, layout="dp=2", name=name).name
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", found)


@given(st.lists(st.sampled_from(["$", "(", ")", "A", "$(A)", "$$", " "]), max_size=6).map("".join))
def test_kubernetes_replaces_nothing_in_a_text(text: str) -> None:
    def passed_on(given: str) -> str:  # as the kubelet does: $$ is one $, and $(A) the value of A
        return re.sub(r"\$\$|\$\(A\)", lambda found: "$" if found.group() == "$$" else "replaced", given)

    assert passed_on(_literal(text)) == text


def test_the_text_of_a_manifest_is_read_as_it_was_meant() -> None:
    yaml = pytest.importorskip("yaml")
    for kind, site in KINDS.items():
        documents = [*yaml.safe_load_all(_script("kubernetes", site))]
        assert [one["kind"] for one in documents] == (["TrainJob"] if "Train" in kind else ["Job", "Service"])
        told = documents[0]["spec"].get("trainer") or documents[0]["spec"]["template"]["spec"]["containers"][0]
        words = ["samestep", "train", "--layout", "dp=8 tp=2", "--out", "runs/default", "--auto-resume"]
        assert told["command"][-len(words) :] == words
        if "shell" in kind:
            assert told["command"][:3] == ["sh", "-c", 'echo : # not yaml\nexec "$@"']
            assert documents[0]["metadata"]["namespace"] == "n"
