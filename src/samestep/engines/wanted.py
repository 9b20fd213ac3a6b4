"""The run for which a script is written: its job, its ranks on each node, and the words of `samestep train`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep import job_files as jobs
from samestep.engines.site import Site
from samestep.errors import InputError, LayoutError
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

    def train_words(self, *, resumes: bool = True) -> list[str]:
        """Return the words of the command that each rank, node or agent runs."""
        words = [*shlex.split(self.site.run.command), "train", *([self.job] if self.job else [])]
        words += [word for setting in self.settings for word in ("--set", setting)]
        words += ["--layout", self.layout] if self.layout else []
        words += ["--ranks", str(self.ranks)] if self.layout == "auto" else []
        return [*words, "--out", self.out, *(["--auto-resume"] if resumes else [])]

    def head(self, engine: str, *notes: str) -> list[str]:
        """Return the first lines of a script: what it runs, and that it may be kept."""
        of = f"{self.ranks} rank{'s' * (self.ranks > 1)} on {self.nodes} node{'s' * (self.nodes > 1)}"
        return [
            f"# {self.name}: {of}, written by samestep launch --on {engine}. Read it, change it, keep it.",
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
        raise InputError(f"--nodes {nodes}: a number works, or names of hosts, each once, as in h1,h2")
    num_nodes = len(hosts) or int(nodes or 1)
    if num_nodes < 1:
        raise InputError(f"--nodes {nodes}: at least one node works")
    layout = str(layout) if layout else None
    given = (
        None
        if layout == "auto"
        else Layout.parse(layout)
        if layout
        else Layout.of(loaded.layout)
        if loaded.layout
        else None
    )
    each = ranks_per_node or _share(given, num_nodes)
    if given is not None and given.world_size != num_nodes * each:
        raise LayoutError(
            f"layout {str(given)!r} has {given.world_size} ranks, and {num_nodes} nodes of {each} have {num_nodes * each}: "
            f"a layout whose degrees multiply to {num_nodes * each} works, such as dp={num_nodes * each}"
        )
    called = name or (Path(job).stem if job else "default")
    return LaunchRequest(
        _name(called),
        str(job) if job else "",
        num_nodes,
        each,
        layout or ("" if given else f"dp={num_nodes * each}"),
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
        raise InputError("--ranks-per-node missing: the number of ranks of each node, such as that of its GPUs, works")
    if layout.world_size % nodes:
        near = max(1, layout.world_size // nodes) * nodes
        raise LayoutError(
            f"{nodes} nodes cannot share the {layout.world_size} ranks of {str(layout)!r} equally; {near} ranks work"
        )
    return layout.world_size // nodes


def shell(words: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Return words as one line of a shell."""
    return shlex.join([*(f"{name}={value}" for name, value in (environment or {}).items()), *words])
