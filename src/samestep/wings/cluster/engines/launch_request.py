"""The run for which a script is written: its job, its ranks on each node, the words of `samestep train`, and the settings of its site.

Such settings, a Slurm partition or the image of a container, stand in a small TOML, and nothing is guessed:

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

import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator

from samestep import job_files as jobs
from samestep.errors import InputError, LayoutError, mistakes_in, short_repr
from samestep.job_tables import Table
from samestep.layout import Layout


@dataclass(frozen=True)
class LaunchRequest:
    """A run on a number of nodes, as an engine is asked for it."""

    name: str
    job: str
    """The path of the job file, as the nodes see it; empty for samestep's own default job."""
    nodes: int
    ranks_per_node: int
    layout: str
    """The layout, auto, or empty for that of the job."""
    out: str
    """The run folder, which all nodes see."""
    settings: tuple[str, ...]
    """The words of --set."""
    hosts: tuple[str, ...]
    """The names of the nodes, where they are given."""
    site: Site

    @property
    def ranks(self) -> int:
        """The number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    def train_words(self) -> list[str]:
        """Return the words of the command that each rank, node or agent runs."""
        words = [*shlex.split(self.site.run.command), "train", *([self.job] if self.job else [])]
        words += [word for setting in self.settings for word in ("--set", setting)]
        words += ["--layout", self.layout] if self.layout else []
        words += ["--ranks", str(self.ranks)] if self.layout == "auto" else []
        return [*words, "--out", self.out, "--auto-resume"]

    def head(self, engine: str, *notes: str) -> list[str]:
        """Return the first lines of a script: what it runs, and that it may be kept."""
        of = f"{self.ranks} rank{'s' * (self.ranks > 1)} on {self.nodes} node{'s' * (self.nodes > 1)}"
        return [
            f"# {self.name}: {of}, written by samestep submit --on {engine}. Read it, change it, keep it.",
            *(f"# {note}" for note in notes),
        ]

    def setup(self) -> list[str]:
        """Return the lines of a shell that come before the command."""
        return [
            *self.site.run.setup,
            *(f"export {name}={shlex.quote(value)}" for name, value in self.site.run.environment.items()),
        ]


def wanted_of(
    job: str | Path | None,
    *,
    nodes: str | int | None = None,
    ranks_per_node: int | None = None,
    layout: str | None = None,
    out: str | Path | None = None,
    settings: Sequence[str] = (),
    name: str | None = None,
    site: Site | None = None,
) -> LaunchRequest:
    """Return the run that the arguments describe, checked as far as this machine can.

    Raises:
        InputError: the job cannot be read, or its layout does not have as many ranks as the nodes.
    """
    loaded = jobs.default(settings) if job is None else jobs.load(job, settings)
    hosts = () if nodes is None or str(nodes).isdecimal() else tuple(str(nodes).split(","))
    if any(not host or host.startswith("-") or not host.isprintable() or " " in host for host in hosts) or len(
        {*hosts}
    ) < len(hosts):
        raise InputError("launch-nodes", f"--nodes {nodes}. Use a number, or names of hosts, each once, as in h1,h2")
    num_nodes = len(hosts) or int(nodes or 1)
    if num_nodes < 1:
        raise InputError("value-out-of-range", f"--nodes {nodes}. Use at least one node")
    layout = str(layout) if layout else None
    spec = (
        None if layout == "auto" else Layout(layout) if layout else Layout(**loaded.layout) if loaded.layout else None
    )
    each = ranks_per_node or _share(spec, num_nodes)
    if spec is not None and spec.world_size != num_nodes * each:
        raise LayoutError(
            "devices-and-ranks",
            f"layout {str(spec)!r} has {spec.world_size} ranks, and {num_nodes} nodes of {each} have {num_nodes * each}. Use "
            f"a layout with degrees that multiply to {num_nodes * each}, such as dp={num_nodes * each}",
        )
    called = name or (Path(job).stem if job else "default")
    return LaunchRequest(
        _name(called),
        str(job) if job else "",
        num_nodes,
        each,
        layout or ("" if spec else f"dp={num_nodes * each}"),
        str(out) if out else f"runs/{re.sub(r'[^A-Za-z0-9_.-]+', '-', called)}",
        tuple(settings),
        hosts,
        site or Site(),
    )


def _name(called: str) -> str:
    """Return a name that every engine takes: small letters, digits and dashes, the first a letter, the last no dash."""
    words = re.sub(r"[^a-z0-9]+", "-", called.lower()).strip("-")
    return (words if words[:1].isalpha() else f"run-{words}")[:40].strip("-")


def _share(layout: Layout | None, nodes: int) -> int:
    """Return the ranks of each node by the layout.

    Raises:
        InputError: there is no layout to tell, or it cannot be shared equally.
    """
    if layout is None:
        raise InputError(
            "launch-nodes",
            "--ranks-per-node missing. Use the number of ranks of each node, such as its number of GPUs, or a layout",
        )
    if layout.world_size % nodes:
        near = max(1, layout.world_size // nodes) * nodes
        raise LayoutError(
            "ranks-indivisible",
            f"{nodes} nodes cannot share the {layout.world_size} ranks of {str(layout)!r} equally. Use {near} ranks",
        )
    return layout.world_size // nodes


def shell(words: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Return words as one line of a shell."""
    return shlex.join([*(f"{name}={value}" for name, value in (environment or {}).items()), *words])


def filled(name: str, request: LaunchRequest, **words: str | Sequence[str]) -> str:
    """Return a template's text with words in place of their <<names>>; a name alone on a line stands for lines, of which there may be none."""
    texts = {
        "head": request.head(name.partition(".")[0].partition("-")[0]),
        "setup": request.setup(),
        "train": shell(request.train_words()),
        **words,
    }

    def text_of(match: re.Match[str]) -> str:
        value = texts[match[1] or match[2]]
        return value if isinstance(value, str) else "".join(f"{line}\n" for line in value)

    template = resources.files("samestep.wings.cluster.engines").joinpath("templates", name).read_text(encoding="utf-8")
    return re.sub(r"(?m)^<<(\w+)>>\n|<<(\w+)>>", text_of, template)


class SiteTable(Table):
    """Settings of a site, which become words of a command: texts of one line, and numbers that count something."""

    model_config = ConfigDict(strict=True)

    @field_validator("*")
    @classmethod
    def _is_one_line_or_a_count(cls, value: Any) -> Any:
        if isinstance(value, str) and ("\n" in value or "\0" in value):
            raise InputError("site-value", f"{short_repr(value)} has more than one line")
        if isinstance(value, int | float) and value < 0:
            raise InputError("value-out-of-range", f"must be 0 or more, got {value}")
        return value


Texts = Annotated[tuple[str, ...], Field(strict=False)]
"""A list of texts in TOML."""


class RunSettings(SiteTable):
    """The command on the machines of the site."""

    command: str = "samestep"
    """The words by which samestep is called."""
    setup: Texts = ()
    """Lines of a shell that come before it."""
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = Field(default_factory=dict)
    """Variables of the environment."""


class SlurmSettings(SiteTable):
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
    options: Texts = ()
    """Further options, such as --exclusive."""


class KubernetesSettings(SiteTable):
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


class MpiSettings(SiteTable):
    """The options of mpirun."""

    by: Literal["openmpi", "mpich"] = "openmpi"
    hosts: Texts = ()
    """The hosts; without them those that mpirun knows from its allocation."""
    port: int = 29500
    options: Texts = ()


class SshSettings(SiteTable):
    """The hosts that are reached by ssh."""

    hosts: Texts = ()


class TorchrunSettings(SiteTable):
    """The options of torchrun."""

    endpoint: str = ""
    """HOST:PORT, at which the agents of several hosts meet."""
    restarts: int = 3
    options: Texts = ()


class RaySettings(SiteTable):
    """The cluster of Ray."""

    address: str = ""
    """The address of its head; empty for the one that RAY_ADDRESS names."""
    gpus_per_rank: float = 0.0
    cpus_per_rank: float = 1.0
    storage: str = ""
    """A folder that all nodes see, in which Ray Train keeps its own records."""
    failures: int = 3
    """How often Ray starts the ranks again."""


class Site(SiteTable):
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
        raise InputError(
            "site-value", f"--cluster {path}: {error.strerror}. Use a TOML file with a table such as [slurm]"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError("site-value", f"--cluster {path}: {error}") from None
    try:
        return Site.model_validate(tables)
    except ValidationError as error:
        raise InputError("site-value", mistakes_in(error, lambda key: f"--cluster {path}", Site)[1]) from None
