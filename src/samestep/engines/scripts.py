"""The script for each engine: written, shown, kept in a file, and handed over only on request."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.engines import kubernetes, mpi, ray, slurm, ssh_script, torchrun
from samestep.engines.wanted import LaunchRequest
from samestep.errors import InputError, RunError, did_you_mean
from samestep.output.output_file import write


@dataclass(frozen=True)
class Engine:
    """A way to start ranks on several machines: its script, and the command that takes it."""

    script: Callable[[LaunchRequest], str]
    suffix: str
    """The end of the script's name."""
    submit: tuple[str, ...]
    """The words that hand the script over, without its name."""


ENGINES: Mapping[str, Engine] = {
    "slurm": Engine(slurm.script, ".sbatch", ("sbatch",)),
    "kubernetes": Engine(kubernetes.script, ".yaml", ("kubectl", "apply", "-f")),
    "ray": Engine(ray.script, ".sh", ("bash",)),
    "mpi": Engine(mpi.script, ".sh", ("bash",)),
    "ssh": Engine(ssh_script.script, ".sh", ("bash",)),
    "torchrun": Engine(torchrun.script, ".sh", ("bash",)),
}


def engine_of(name: str) -> Engine:
    """Return the engine of a name.

    Raises:
        InputError: there is none.
    """
    if name not in ENGINES:
        raise InputError(f"--on {name}{did_you_mean(name, ENGINES)}: {', '.join(ENGINES)} work")
    return ENGINES[name]


def emit(wanted: LaunchRequest, on: str, path: str | Path | None) -> tuple[str, Path]:
    """Return the script of an engine and its file, which is written if a path is given.

    Raises:
        InputError: the engine needs more than is given, or the file cannot be written.
    """
    engine = engine_of(on)
    text = engine.script(wanted)
    file = Path(path) if path is not None else Path(f"{wanted.name}{engine.suffix}")
    if path is not None:
        write(file, text)
    return text, file


def submit(on: str, file: Path, run: Callable[[Sequence[str]], int] | None = None) -> None:
    """Hand a script over to its engine.

    Raises:
        InputError: the engine's command is not here.
        RunError: it failed.
    """
    words = [*engine_of(on).submit, str(file)]
    try:
        status = run(words) if run else subprocess.run(words, check=False).returncode
    except FileNotFoundError:
        raise InputError(
            f"--submit runs {words[0]}, which is not on this machine: copy {file} to one that has it"
        ) from None
    if status:
        raise RunError(f"{' '.join(words)} ended with status {status}")
