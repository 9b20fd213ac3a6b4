"""mpirun of Open MPI and mpiexec of MPICH, on this machine: the emitted script is what runs."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Literal

import pytest

from samestep.wings.cluster.engines.launch_request import MpiSettings
from tests import small
from tests.launchers import real
from tests.launchers.test_variables import _port

pytestmark = [pytest.mark.nightly, pytest.mark.time_limit(900)]
KINDS = ("openmpi", "mpich")
By = Literal["openmpi", "mpich"]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return real.one_rank(tmp_path_factory.mktemp("one") / "run")


def _script(by: By, folder: Path, **keys: object) -> tuple[Path, dict[str, str]]:
    """The script, and the environment in which `mpirun` is the one of this test."""
    if (program := real.mpirun(by)) is None:
        pytest.skip(f"{by} is not installed (make mpi; Debian: {'openmpi-bin' if by == 'openmpi' else 'mpich'})")
    (folder / "bin").mkdir()
    if (
        by == "openmpi"
    ):  # its mpirun of Debian has a longer name; mpiexec.hydra has its own, and looks for others where it is
        (folder / "bin" / "mpirun").symlink_to(program)
    options = ("--allow-run-as-root", "--oversubscribe") if by == "openmpi" else ()
    site = {"mpi": MpiSettings(by=by, options=options, port=int(_port()))}
    file = real.emitted("mpi", folder / "x.sh", keys, site, layout="dp=2 tp=2", out="run")
    return file, {**os.environ, "PATH": f"{folder / 'bin'}:{Path(program).parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize("by", KINDS)
def test_the_emitted_script_gives_the_losses_of_one_rank(by: By, one_rank: list[float], tmp_path: Path) -> None:
    script, environment = _script(by, tmp_path)
    ended = subprocess.run(["bash", script], cwd=tmp_path, env=environment, text=True, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"samestep: 4 ranks by {'Open MPI' if by == 'openmpi' else 'MPICH'}, on one host" in ended.stderr
    assert small.losses(tmp_path / "run") == pytest.approx(one_rank, abs=1e-9)


@pytest.mark.parametrize("by", KINDS)
def test_a_run_that_is_asked_to_stop_saves_and_ends_with_its_status(by: By, tmp_path: Path) -> None:
    script, environment = _script(by, tmp_path, **{"train.steps": 100_000})
    with subprocess.Popen(
        ["bash", script], cwd=tmp_path, env=environment, text=True, stderr=subprocess.PIPE
    ) as running:
        log = tmp_path / "run" / "metrics.jsonl"
        small.wait_for(lambda: log.exists() and log.read_text().count("\n") >= 2, 300)
        running.send_signal(signal.SIGTERM)
        running.wait(120)
        assert running.returncode == 143, running.stderr.read() if running.stderr else ""
    assert len(small.checkpoints(tmp_path / "run")) == 1
