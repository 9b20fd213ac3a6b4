"""The settings of a site, such as a Slurm partition or the image of a container: a small TOML, and nothing is guessed.

```toml
[run]
command = "samestep"              # how the command is called there
setup = ["module load python"]    # lines of a shell before it

[slurm]
partition = "gpu"
gpus_per_node = 8
time = "12:00:00"

[kubernetes]
image = "registry.example/train:1"
claim = "shared"                  # the volume that all pods see, at `at`
```
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from samestep.errors import InputError, did_you_mean, short_repr


@dataclass(frozen=True)
class RunSettings:
    """The command on the machines of the site."""

    command: str = "samestep"
    """The words by which samestep is called."""
    setup: tuple[str, ...] = ()
    """Lines of a shell that come before it."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the environment."""


@dataclass(frozen=True)
class SlurmSettings:
    """The options of sbatch."""

    by: Literal["srun", "torchrun"] = "srun"
    """What starts the ranks: srun one task each, or srun one torchrun on each node."""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    time: str = ""
    memory: str = ""
    gpus_per_node: int = 0
    cpus_per_task: int = 0
    signal_s: int = 120
    """Seconds before the time limit at which the run is asked to save and end."""
    restarts: int = 3
    """How often a run that fails, as one whose node is lost, goes back into the queue; a run that was stopped always does."""
    options: tuple[str, ...] = ()
    """Further options, such as --exclusive."""


@dataclass(frozen=True)
class KubernetesSettings:
    """The pods of a cluster."""

    kind: Literal["Job", "TrainJob"] = "Job"
    """An indexed Job with a headless Service, which any cluster runs, or a TrainJob of Kubeflow's Trainer."""
    image: str = ""
    namespace: str = ""
    runtime: str = "torch-distributed"
    """The training runtime of a TrainJob."""
    gpus_per_node: int = 0
    gpu: str = "nvidia.com/gpu"
    """The name of the resource of GPUs."""
    claim: str = ""
    """The volume claim that all pods share."""
    at: str = "/shared"
    """Where it is mounted."""
    port: int = 29500
    restarts: int = 10
    """How often pods may fail before the Job does."""
    grace_s: int = 120
    """Seconds between the request to stop and the end of a pod."""


@dataclass(frozen=True)
class MpiSettings:
    """The options of mpirun."""

    by: Literal["openmpi", "mpich"] = "openmpi"
    hosts: tuple[str, ...] = ()
    """The hosts; without them those that mpirun knows from its allocation."""
    port: int = 29500
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class SshSettings:
    """The hosts that are reached by ssh."""

    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class TorchrunSettings:
    """The options of torchrun."""

    endpoint: str = ""
    """HOST:PORT, at which the agents of several hosts meet."""
    restarts: int = 3
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class RaySettings:
    """The cluster of Ray."""

    address: str = ""
    """The address of its head; empty for the one that RAY_ADDRESS names."""
    gpus_per_rank: float = 0.0
    cpus_per_rank: float = 1.0
    storage: str = ""
    """A folder that all nodes see, in which Ray Train keeps its own records."""
    failures: int = 3
    """How often Ray starts the ranks again."""


@dataclass(frozen=True)
class Site:
    """All settings of a site; each engine reads the table with its name."""

    run: RunSettings = RunSettings()
    slurm: SlurmSettings = SlurmSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    mpi: MpiSettings = MpiSettings()
    ssh: SshSettings = SshSettings()
    torchrun: TorchrunSettings = TorchrunSettings()
    ray: RaySettings = RaySettings()


def read_site(path: str | Path | None) -> Site:
    """Return the settings in a TOML file; without a file those of no site.

    Raises:
        InputError: the file cannot be read, or has an unknown key or a value of another type.
    """
    if path is None:
        return Site()
    try:
        with Path(path).open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise InputError(f"--site {path}: {error.strerror}; a TOML file with a table such as [slurm] works") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--site {path}: {error}") from None
    return Site(**_read(Site, tables, f"--site {path}: "))


def _read(kind: type, values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the values of a dataclass's fields, checked.

    Raises:
        InputError: a key is unknown, or a value is of another type.
    """
    types = get_type_hints(kind)
    found = {}
    for key, value in values.items():
        if key not in types:
            raise InputError(
                f"{where}unknown key {key!r}{did_you_mean(key, types)}; the keys here are {', '.join(types)}"
            )
        wanted = types[key]
        if dataclasses.is_dataclass(wanted) and isinstance(wanted, type):
            if not isinstance(value, dict):
                raise InputError(f"{where}{key} = {short_repr(value)} is no table: [{key}] begins one")
            found[key] = wanted(**_read(wanted, value, f"{where}{key}."))
        else:
            found[key] = _value(wanted, value, f"{where}{key}")
    return found


def _value(wanted: Any, value: Any, where: str) -> Any:
    """Return a value in the type of its key.

    Raises:
        InputError: it is of another type, or no word that works.
    """
    if get_origin(wanted) is Literal:
        if value not in get_args(wanted):
            raise InputError(f"{where} = {short_repr(value)}: {' and '.join(map(repr, get_args(wanted)))} work")
    elif get_origin(wanted) is tuple:
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise InputError(f'{where} = {short_repr(value)} is no list of texts: ["..."] is one')
        value = tuple(value)
    elif get_origin(wanted) is dict:
        if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
            raise InputError(f'{where} = {short_repr(value)} is no table of texts: {{NAME = "..."}} is one')
        if wrong := [name for name in value if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]:
            raise InputError(
                f"{where}: {wrong[0]!r} is no name of a variable: letters, digits and _ are, as in HF_HOME"
            )
    elif wanted is float and type(value) is int:
        value = float(value)
    elif type(value) is not wanted:
        raise InputError(f"{where} = {short_repr(value)} is no {_WORDS[wanted]}")
    if wanted in (int, float) and value < 0:
        raise InputError(f"{where} = {value} is below 0")
    if isinstance(value, str) and ("\n" in value or "\0" in value):
        raise InputError(f"{where} = {short_repr(value)} has more than one line")
    return value


_WORDS = {str: 'text, such as "gpu"', int: "whole number", float: "number"}
