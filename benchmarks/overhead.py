"""Step time, memory, start-up and scaling of samestep beside its peers, in one run: `make bench`.

Every contestant of `peers.py` is a crew of processes of its own. All crews of a comparison live at the same time and
take turns of a few steps, so that what else happens on the machine hits all alike; a figure is the median over turns
of the ratio of two crews in the same round. Before anything is timed, the losses of the first steps are compared.

    python benchmarks/overhead.py [--quick] [--only steps|start|scaling] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import psutil
import tomli_w
from peers import CLIP_NORM, SIZES, STEPS
from rich.console import Console
from rich.table import Table

from samestep.datasets import sample_indices

HERE = Path(__file__).resolve().parent
BATCH = 8
"""Samples of one rank in a step of the middle size."""
HEAVY_BATCH = 64
"""Samples of a step of the heavy size, on one rank or over two."""
CHECKED_STEPS = 5
SAME_LOSS = 1e-4
STARTS = ("samestep", "ddp", "accelerate", "fabric")
NAMES = {
    "samestep": "samestep",
    "ddp": "hand-written DDP",
    "accelerate": "Accelerate",
    "fabric": "Lightning Fabric",
    "plain": "plain PyTorch loop",
    "train": "`samestep train`",
}


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    generations: int
    """Times that all crews are started anew: where memory happens to lie makes a process faster or slower for good."""
    rounds: int
    turn: int
    """Timed steps of a turn; one more before them is not timed."""
    starts: int
    heavy_rounds: int


THOROUGH = Effort(generations=2, rounds=9, turn=3, starts=2, heavy_rounds=7)
QUICK = Effort(generations=1, rounds=3, turn=2, starts=1, heavy_rounds=2)


@dataclass(frozen=True)
class Figure:
    """One thing that was measured: all its values, of which the median is quoted."""

    section: str
    what: str
    values: tuple[float, ...]
    unit: str = ""
    aim: str = ""
    met: bool | None = None

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles, or with few values the least and the greatest."""
        if len(self.values) < 4:
            return min(self.values), max(self.values)
        first, _, third = statistics.quantiles(self.values, n=4, method="inclusive")
        return first, third


# -- crews -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """What the ranks of a crew said of the steps they took."""

    seconds: float
    """Of the slowest rank, for one step."""
    cpu_s: float
    """Over all ranks, for one step."""
    losses: tuple[float, ...]
    """Means over the ranks."""


class Crew:
    """The processes of one contestant. Its first step is done when the constructor returns."""

    def __init__(self, name: str, ranks: int, size: str, global_batch: int, folder: Path) -> None:
        self.name, self.ranks = name, ranks
        self._said: list[TextIO] = []
        self._wires: list[socket.socket] = []
        self.pids: list[int] = []
        self.losses: list[float] = []
        with tempfile.TemporaryDirectory(dir=folder) as own, socket.socket(socket.AF_UNIX) as server:
            path = Path(own, "socket")
            server.bind(str(path))
            server.listen(ranks)
            words = [f"--size={size}", f"--ranks={ranks}", f"--global-batch={global_batch}", f"--socket={path}"]
            self._log = (folder / f"{name}-{path.parent.name}.log").open("w+")
            began = time.perf_counter()
            self.process = _start(
                [*_command(name, ranks), *words, f"--order={folder / f'{global_batch}.npy'}"], self._log
            )
            try:
                self._meet(server)
            except BaseException:
                self.end()
                raise
            self.first_step_s = time.perf_counter() - began

    def _meet(self, server: socket.socket) -> None:
        """Wait until every rank has taken its first step."""
        server.settimeout(0.2)
        deadline = time.monotonic() + 120
        while len(self._wires) < self.ranks:
            try:
                wire = server.accept()[0]
            except TimeoutError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{self.name} did not take its first step:\n{self._last_words()}") from None
                continue
            wire.setblocking(True)
            self._wires.append(wire)
            self._said.append(wire.makefile("r"))
        hellos = [self._hear(said) for said in self._said]
        self.pids = [hello["pid"] for hello in hellos]
        self.losses += _rank_means(hellos)

    def _hear(self, said: TextIO) -> dict[str, Any]:
        line = said.readline()
        if not line:
            raise SystemExit(f"{self.name} died:\n{self._last_words()}")
        facts: dict[str, Any] = json.loads(line)
        return facts

    def ask(self, steps: int) -> None:
        """Let all ranks begin with some steps."""
        for wire in self._wires:
            wire.sendall(b"%d\n" % steps)

    def hear(self, steps: int) -> Turn:
        """Wait for the steps that were asked for."""
        heard = [self._hear(said) for said in self._said]
        losses = _rank_means(heard)
        self.losses += losses
        seconds = max(facts["seconds"] for facts in heard) / steps
        return Turn(seconds, sum(facts["cpu_s"] for facts in heard) / steps, tuple(losses))

    def take(self, steps: int, warm_up: int = 0) -> Turn:
        """Take steps, the first ones untimed."""
        if warm_up:
            self.ask(warm_up)
            self.hear(warm_up)
        self.ask(steps)
        return self.hear(steps)

    def end(self) -> None:
        """Let the processes leave; kill what does not."""
        with contextlib.suppress(OSError):
            self.ask(0)
        for wire in (*self._said, *self._wires):
            wire.close()
        _finish(self.process)
        self._log.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-30:])


def _rank_means(facts: Sequence[dict[str, Any]]) -> list[float]:
    """Average each step's loss over the ranks: each counts as many tokens, and samestep's is the same on all."""
    return [statistics.fmean(values) for values in zip(*(each["losses"] for each in facts), strict=True)]


def _command(name: str, ranks: int) -> list[str]:
    """How a user starts this contestant."""
    script = [str(HERE / "peers.py"), name]
    if name in ("ddp", "accelerate"):  # accelerate launch knows no two processes on CPUs but by MPI; torchrun does
        port = f"--master-port={_free_port()}"
        return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", port, *script]
    return [sys.executable, *script]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _start(command: Sequence[str], log: TextIO) -> subprocess.Popen[bytes]:
    """Start a contestant with one thread a rank, all traffic on loopback, and bytecode caches as users have them."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, cwd=HERE, env=env, stdout=log, stderr=log, start_new_session=True)


def _finish(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def crews(wanted: Sequence[tuple[str, str, int, str, int]], folder: Path) -> Iterator[dict[str, Crew]]:
    """Start crews, each (key, contestant, ranks, size, global batch), one after the other; end them all."""
    started: dict[str, Crew] = {}
    try:
        for key, name, ranks, size, global_batch in wanted:
            started[key] = Crew(name, ranks, size, global_batch, folder)
        yield started
    finally:
        for crew in started.values():
            crew.end()


# -- step time -------------------------------------------------------------------------------------

TWO_RANKS = (*STARTS, "ddp again")
ONE_RANK = ("samestep", "plain")
Times = dict[str, list[Turn]]


def measure_steps(effort: Effort, folder: Path, say: Callable[[str], None]) -> list[Figure]:
    """Compare step times: two ranks against the peers, one rank against a plain loop."""
    two: Times = {name: [] for name in TWO_RANKS}
    one: Times = {name: [] for name in ONE_RANK}
    for generation in range(effort.generations):
        say(f"step times, generation {generation + 1} of {effort.generations}")
        pairs = [(name, name.removesuffix(" again"), 2, "middle", 2 * BATCH) for name in TWO_RANKS]
        with crews(pairs, folder) as started:
            _check_losses(started)
            _take_turns(started, two, effort)
        with crews([(name, name, 1, "middle", BATCH) for name in ONE_RANK], folder) as started:
            _check_losses(started)
            _take_turns(started, one, effort)
    return _step_figures(two, one)


def _check_losses(started: dict[str, Crew]) -> None:
    """Assert that all crews do equal work: the same losses over the first steps."""
    for crew in started.values():
        crew.take(CHECKED_STEPS - 1)
    reference = next(iter(started.values())).losses
    for name, crew in started.items():
        apart = max(abs(ours - theirs) for ours, theirs in zip(reference, crew.losses, strict=True))
        assert apart <= SAME_LOSS, f"{name} does other work: losses {crew.losses} against {reference}"


def _take_turns(started: dict[str, Crew], times: Times, effort: Effort) -> None:
    """Let the crews take turns; each round begins with another one."""
    names = list(started)
    for round_index in range(effort.rounds):
        first = round_index % len(names)
        for name in (*names[first:], *names[:first]):
            times[name].append(started[name].take(effort.turn, warm_up=1))


def _ratios(ours: list[Turn], theirs: list[Turn], of: Callable[[Turn], float]) -> tuple[float, ...]:
    return tuple(of(a) / of(b) for a, b in zip(ours, theirs, strict=True))


def _wall(turn: Turn) -> float:
    return turn.seconds


def _cpu(turn: Turn) -> float:
    return turn.cpu_s


def _step_figures(two: Times, one: Times) -> list[Figure]:
    figures = []
    for section, times, peers in (("two ranks", two, ("ddp", "accelerate", "fabric")), ("one rank", one, ("plain",))):
        for peer in peers:
            limit = 1.02 if peer in ("ddp", "plain") else 1.0
            ratios = _ratios(times["samestep"], times[peer], _wall)
            met = statistics.median(ratios) <= limit
            figures.append(Figure(section, f"step time, samestep / {NAMES[peer]}", ratios, "x", f"<= {limit:.2f}", met))
        for peer in peers:
            ratios = _ratios(times["samestep"], times[peer], _cpu)
            figures.append(Figure(section, f"processor time of a step, samestep / {NAMES[peer]}", ratios, "x"))
        if "ddp again" in times:
            noise = _ratios(times["ddp again"], times["ddp"], _wall)
            figures.append(Figure(section, "step time, hand-written DDP / itself (the noise)", noise, "x"))
        for name, turns in times.items():
            if name in NAMES:
                steps_ms = tuple(turn.seconds * 1e3 for turn in turns)
                figures.append(Figure(section, f"step time, {NAMES[name]}", steps_ms, "ms"))
    return figures


# -- memory and start-up ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes of one process."""

    peak_resident: float
    """All it has mapped and touched, shared pages counted whole."""
    proportional: float
    """PSS: pages shared with other processes counted by their part."""
    proportional_anonymous: float
    """The part of PSS that is no file: not lessened by strangers who have mapped the same libraries."""


def read_memory(pid: int) -> Memory:
    """Read the memory of a process; without Linux's files only what is resident now."""
    folder = Path("/proc", str(pid))
    if not (folder / "smaps_rollup").exists():
        resident = float(psutil.Process(pid).memory_info().rss)
        return Memory(resident, resident, resident)
    rows = [line.split() for file in ("status", "smaps_rollup") for line in (folder / file).read_text().splitlines()]
    known = {row[0]: float(row[1]) * 1024 for row in rows if row[0] in ("VmHWM:", "Pss:", "Pss_Anon:")}
    return Memory(known["VmHWM:"], known["Pss:"], known["Pss_Anon:"])


class MemoryPeaks:
    """The most that each process of a tree and the whole tree were seen to hold."""

    def __init__(self) -> None:
        self.each: dict[int, Memory] = {}
        self.tree = 0.0

    def look(self, root: int) -> None:
        """Read the memory of a process and its descendants."""
        total = 0.0
        with contextlib.suppress(psutil.Error):
            for pid in (root, *(child.pid for child in psutil.Process(root).children(recursive=True))):
                with contextlib.suppress(OSError, KeyError, psutil.Error):
                    now = read_memory(pid)
                    before = self.each.get(pid, now)
                    total += now.proportional
                    pairs = zip(dataclasses.astuple(now), dataclasses.astuple(before), strict=True)
                    self.each[pid] = Memory(*(max(pair) for pair in pairs))
        self.tree = max(self.tree, total)


@dataclass(frozen=True)
class Start:
    """What one start of a contestant took."""

    seconds: float
    rank: Memory
    """Of the rank that has most."""
    tree: float
    """PSS of all its processes, launchers included."""


def measure_starts(effort: Effort, folder: Path, say: Callable[[str], None]) -> list[Figure]:
    """Start each contestant alone on two ranks, in turn; look at its memory while it takes a few steps."""
    starts: dict[str, list[Start]] = {name: [] for name in ("train", *STARTS)}
    for attempt in range(effort.starts + 1):  # the first fills the file cache and is left out
        say(f"starts, {f'turn {attempt} of {effort.starts}' if attempt else 'warming the file cache'}")
        for name, known in starts.items():
            if attempt == 0 and name == "ddp":
                continue  # Accelerate's start has read all that it reads
            start = _start_train(folder / f"run-{attempt}") if name == "train" else _start_crew(name, folder)
            if attempt:
                known.append(start)
    return _start_figures(starts)


def _start_crew(name: str, folder: Path) -> Start:
    with crews([(name, name, 2, "middle", 2 * BATCH)], folder) as started:
        crew = started[name]
        peaks = MemoryPeaks()
        for _ in range(3):
            crew.ask(1)
            for _ in range(8):
                peaks.look(crew.process.pid)
                time.sleep(0.02)
            crew.hear(1)
        return Start(crew.first_step_s, _greatest([peaks.each[pid] for pid in crew.pids]), peaks.tree)


def _start_train(folder: Path) -> Start:
    """Start the verb `train` on the same model and data; its first step is done when its metrics have a line."""
    folder.mkdir()
    (folder / "job.toml").write_text(_job_file())
    command = [sys.executable, "-m", "samestep.cli"]
    program = Path(sys.executable).with_name("samestep")
    command = [str(program)] if program.exists() else command
    with (folder / "log").open("w+") as log:
        began = time.perf_counter()
        words = ["train", str(folder / "job.toml"), "--layout=dp=2", "--steps=4", f"--out={folder / 'run'}"]
        process = _start([*command, *words], log)
        try:
            metrics = folder / "run" / "metrics.jsonl"
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None:
                    raise SystemExit(f"samestep train took no step:\n{Path(log.name).read_text()}")
                time.sleep(0.005)
            seconds = time.perf_counter() - began
            peaks = MemoryPeaks()
            while process.poll() is None:
                peaks.look(process.pid)
                time.sleep(0.02)
        finally:
            _finish(process)
    ranks = [memory for pid, memory in peaks.each.items() if pid != process.pid]
    return Start(seconds, _greatest(ranks), peaks.tree)


def _job_file() -> str:
    return tomli_w.dumps(
        {
            "model": {"source": "peers:build", "config": {"size": "middle"}},
            "data": {"source": "peers:windows", "held_out": 0.0},
            "train": {"loss": "peers:loss_sum", "global_batch": 2 * BATCH, "steps": STEPS, "evaluate_samples": 0},
            "optimizer": {"name": "peers:adamw", "clip_norm": CLIP_NORM},
            "run": {"device": "cpu"},
        }
    )


def _greatest(memories: Sequence[Memory]) -> Memory:
    return Memory(*(max(values) for values in zip(*map(dataclasses.astuple, memories), strict=True)))


def _start_figures(starts: dict[str, list[Start]]) -> list[Figure]:
    kinds: tuple[tuple[str, str, str, Callable[[Start], float], bool], ...] = (
        ("start-up", "process start to first step", "s", lambda start: start.seconds, True),
        ("memory", "peak resident memory of a rank", "MB", lambda start: start.rank.peak_resident / 1e6, True),
        ("memory", "PSS of a rank", "MB", lambda start: start.rank.proportional / 1e6, False),
        ("memory", "PSS of a rank, anonymous", "MB", lambda start: start.rank.proportional_anonymous / 1e6, False),
        ("memory", "PSS of all its processes", "MB", lambda start: start.tree / 1e6, False),
    )
    figures = []
    for section, what, unit, of, has_aim in kinds:
        values = {name: tuple(of(start) for start in known) for name, known in starts.items()}
        least = min(statistics.median(values[name]) for name in ("ddp", "accelerate", "fabric"))
        for name, its in values.items():
            ours = name in ("samestep", "train")
            aim, met = (f"< {least:.4g}", statistics.median(its) < least) if ours and has_aim else ("", None)
            figures.append(Figure(section, f"{what}, {NAMES[name]}", its, unit, aim, met))
    return figures


# -- scaling ---------------------------------------------------------------------------------------


def measure_scaling(effort: Effort, folder: Path, say: Callable[[str], None]) -> list[Figure]:
    """Compare one rank with two on the same global batch, and with what this machine gives two processes at once."""
    say("scaling")
    wanted = [
        ("alone", "samestep", 1, "heavy", HEAVY_BATCH),
        ("other", "samestep", 1, "heavy", HEAVY_BATCH),
        ("pair", "samestep", 2, "heavy", HEAVY_BATCH),
    ]
    scaling, ceiling, alone_s, pair_s = [], [], [], []
    with crews(wanted, folder) as started:
        _check_losses(started)
        for _ in range(effort.heavy_rounds):
            # On either side of what it is compared with: the machine's speed may drift within a round.
            before = started["alone"].take(1).seconds
            pair = started["pair"].take(2).seconds
            alone = (before + started["alone"].take(1).seconds) / 2
            both = _at_once([started["alone"], started["other"]])
            scaling.append(alone / pair)
            ceiling.append(sum(alone / seconds for seconds in both))
            alone_s.append(alone)
            pair_s.append(pair)
    reached = tuple(100 * ours / limit for ours, limit in zip(scaling, ceiling, strict=True))
    met = statistics.median(scaling) >= 1.9
    return [
        Figure("scaling", "tokens/s, samestep dp=2 / dp=1", tuple(scaling), "x", ">= 1.90", met),
        Figure("scaling", "ceiling: two independent one-rank processes / one", tuple(ceiling), "x"),
        Figure("scaling", "part of the ceiling that dp=2 reaches", reached, "%"),
        Figure("scaling", "step time, samestep dp=1", tuple(alone_s), "s"),
        Figure("scaling", "step time, samestep dp=2", tuple(pair_s), "s"),
    ]


def _at_once(crew_list: Sequence[Crew]) -> list[float]:
    for crew in crew_list:
        crew.ask(1)
    return [crew.hear(1).seconds for crew in crew_list]


# -- telling ---------------------------------------------------------------------------------------


def row(figure: Figure) -> tuple[str, ...]:
    """A figure as words: what, median, spread, number of values, aim, whether it is met."""
    digits = {"x": 3, "s": 2, "ms": 1, "MB": 0, "%": 1}[figure.unit]
    low, high = figure.spread
    unit = {"x": "", "%": " %"}.get(figure.unit, f" {figure.unit}")
    met = {None: "", True: "yes", False: "NO"}[figure.met]
    spread = f"{low:.{digits}f} to {high:.{digits}f}"
    return figure.what, f"{figure.median:.{digits}f}{unit}", spread, str(len(figure.values)), figure.aim, met


HEADS = ("what", "median", "spread", "n", "aim", "met")


def show(figures: Sequence[Figure], console: Console) -> None:
    """Print a table for each section."""
    for section in dict.fromkeys(figure.section for figure in figures):
        table = Table(*HEADS, title=section, title_justify="left", min_width=100)
        for figure in figures:
            if figure.section == section:
                table.add_row(*row(figure), style="red" if figure.met is False else "")
        console.print(table)


def to_markdown(figures: Sequence[Figure], circumstances: str) -> str:
    """Write all figures as one Markdown table."""
    lines = [
        "<!-- made by `python benchmarks/overhead.py --markdown FILE` -->",
        circumstances,
        "",
        f"| | {' | '.join(HEADS)} |",
        "|---|---|--:|---|--:|---|---|",
    ]
    lines += [f"| {figure.section} | {' | '.join(row(figure))} |" for figure in figures]
    return "\n".join(lines) + "\n"


def to_json(figures: Sequence[Figure], circumstances: str) -> str:
    """Write all figures with all their values."""
    rows = [{**dataclasses.asdict(figure), "median": figure.median, "spread": figure.spread} for figure in figures]
    return json.dumps({"circumstances": circumstances, "figures": rows}, indent=1) + "\n"


def describe() -> str:
    """Say what was measured, with which versions, where."""
    size = SIZES["middle"]
    versions = ", ".join(f"{name} {version(name)}" for name in ("samestep", "torch", "accelerate", "lightning-fabric"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"Llama-like, hidden {size.hidden}, {size.layers} layers, {BATCH} x {size.tokens} tokens a rank, float32, fused "
        f"AdamW, clipped at {CLIP_NORM}, gloo, one thread a rank; scaling: hidden {SIZES['heavy'].hidden}, "
        f"{SIZES['heavy'].layers} layers, {HEAVY_BATCH} x {SIZES['heavy'].tokens} tokens over all ranks. "
        f"{versions}, Python {platform.python_version()}, {cores} cores, load before {os.getloadavg()[0]:.1f}. "
        "Spread: quartiles over the turns, or least to greatest of fewer than four."
    )


SECTIONS = {"steps": measure_steps, "start": measure_starts, "scaling": measure_scaling}


def main() -> None:
    """Measure, print, write files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns: under a minute, more spread")
    parser.add_argument("--only", choices=SECTIONS, help="measure only this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all values")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    words = parser.parse_args()
    console = Console(highlight=False)
    circumstances = describe()
    console.print(circumstances)
    effort = QUICK if words.quick else THOROUGH
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="samestep-bench-") as name:
        folder = Path(name)
        for global_batch in (BATCH, 2 * BATCH, HEAVY_BATCH):
            _write_order(folder, global_batch)
        chosen = [words.only] if words.only else list(SECTIONS)
        figures = [figure for each in chosen for figure in SECTIONS[each](effort, folder, console.print)]
    show(figures, console)
    missed = [figure.what for figure in figures if figure.met is False]
    console.print(f"Aims missed: {'; '.join(missed) or 'none'}. {time.perf_counter() - began:.0f} s.")
    if words.json:
        words.json.write_text(to_json(figures, circumstances))
    if words.markdown:
        words.markdown.write_text(to_markdown(figures, circumstances))


def _write_order(folder: Path, global_batch: int) -> None:
    """Write down the order in which samestep reads the samples, for the peers."""
    steps = [sample_indices(step, global_batch, global_batch * STEPS, 0) for step in range(STEPS)]
    np.save(folder / f"{global_batch}.npy", np.concatenate(steps))


if __name__ == "__main__":
    main()
