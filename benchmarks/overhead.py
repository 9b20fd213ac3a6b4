"""Step time, memory, start-up and scaling of samestep beside its peers, in one run: `make bench`.

Every contestant of `peers.py` is a crew of processes of its own. All crews of a comparison live at the same time and
take turns of a few steps, so that what else happens on the machine hits all alike; a figure is the median over turns
of the ratio of two crews in the same round. Before anything is timed, the losses of the first steps are compared.

    python benchmarks/overhead.py [--quick] [--only peers|scaling] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
SAME_LOSS = 1e-4
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
    """How long is measured; the starts come on top."""

    generations: int
    """Times that all crews are started anew: where memory happens to lie makes a process faster or slower for good."""
    two_ranks_s: float
    """Of turns in a generation."""
    one_rank_s: float
    scaling_s: float
    control: bool
    """Whether a second crew of the hand-written loop shows how far two equal crews are apart."""
    warms_up: bool
    """Whether the file cache is filled before any start is timed."""
    least_rounds: int


THOROUGH = Effort(
    generations=2, two_ranks_s=22, one_rank_s=8, scaling_s=22, control=True, warms_up=True, least_rounds=5
)
QUICK = Effort(generations=1, two_ranks_s=3, one_rank_s=1, scaling_s=0, control=False, warms_up=False, least_rounds=2)
TURN = 3
"""Timed steps of a turn; one more before them is not timed."""
WATCH_EVERY = 100
"""Steps between two regular checks of samestep, the default; `canary.py` tells what a check costs."""


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
    """The processes of one contestant: they start with the object, and have taken a step when `meet` returns."""

    def __init__(self, name: str, ranks: int, size: str, global_batch: int, folder: Path) -> None:
        self.name, self.ranks = name, ranks
        self.pids: list[int] = []
        self.losses: list[float] = []
        self.first_step_s = math.nan
        self._wires: list[socket.socket] = []
        self._said: list[TextIO] = []
        own = Path(tempfile.mkdtemp(dir=folder))
        self._log = (own / "log").open("w+")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(own / "socket"))
        self._server.listen(ranks)
        words = [f"--size={size}", f"--ranks={ranks}", f"--global-batch={global_batch}", f"--socket={own / 'socket'}"]
        order = f"--order={folder / f'{global_batch}.npy'}"
        self._began = time.perf_counter()
        self.process = _start([*_command(name, ranks), *words, order], self._log)

    def meet(self) -> None:
        """Wait until every rank has taken its first step."""
        self._server.settimeout(0.2)
        deadline = time.monotonic() + 120
        while len(self._wires) < self.ranks:
            try:
                wire = self._server.accept()[0]
            except TimeoutError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{self.name} did not take its first step:\n{self._last_words()}") from None
                continue
            wire.setblocking(True)
            self._wires.append(wire)
            self._said.append(wire.makefile("r"))
        self.first_step_s = time.perf_counter() - self._began
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
        """Take steps, the first ones untimed, as are the steps before one in which samestep checks itself."""
        first = len(self.losses) + warm_up
        while any(_is_checked(first + index) for index in range(1, steps + 1)):
            first += 1
        warm_up = first - len(self.losses)
        if warm_up:
            self.ask(warm_up)
            self.hear(warm_up)
        self.ask(steps)
        return self.hear(steps)

    def dismiss(self) -> None:
        """Let the processes leave."""
        with contextlib.suppress(OSError):
            self.ask(0)
        for said in self._said:
            said.close()
        for wire in (*self._wires, self._server):
            wire.close()

    def end(self) -> None:
        """Wait for the processes; kill what does not leave."""
        _finish(self.process)
        self._log.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        return "".join(self._log.readlines()[-30:])


def _is_checked(step: int) -> bool:
    """Return whether samestep runs samples again in a step, counted from 1: early at powers of two, then regularly."""
    return step % WATCH_EVERY == 0 or (step < WATCH_EVERY and step & (step - 1) == 0)


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


def _start(command: Sequence[str], log: TextIO | None) -> subprocess.Popen[bytes]:
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


Wanted = dict[str, tuple[str, int, str, int]]
"""Crews by a name of their own: contestant, ranks, size, global batch."""


@contextlib.contextmanager
def crews(wanted: Wanted, folder: Path, *, one_by_one: bool = False) -> Iterator[dict[str, Crew]]:
    """Start crews, for figures of their start one after the other; end them all."""
    started: dict[str, Crew] = {}
    try:
        for key, words in wanted.items():
            started[key] = Crew(*words, folder)
            if one_by_one:
                started[key].meet()
        if not one_by_one:
            for crew in started.values():
                crew.meet()
        yield started
    finally:
        for crew in started.values():
            crew.dismiss()
        for crew in started.values():
            crew.end()


# -- memory ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes of one process, or of the one of several that has most."""

    resident: float
    """The peak of all it has touched; pages shared with other processes counted whole."""
    anonymous: float
    """PSS without files: shared pages counted by their part. Files are left out since strangers map torch's too."""


def read_memory(pid: int) -> Memory:
    """Read the memory of a process; without Linux's files only what is resident now."""
    folder = Path("/proc", str(pid))
    if not (folder / "smaps_rollup").exists():
        resident = float(psutil.Process(pid).memory_info().rss)
        return Memory(resident, resident)
    rows = [line.split() for file in ("status", "smaps_rollup") for line in (folder / file).read_text().splitlines()]
    known = {row[0]: float(row[1]) * 1024 for row in rows if row[0] in ("VmHWM:", "Pss_Anon:")}
    return Memory(known["VmHWM:"], known["Pss_Anon:"])


class MemoryWatch:
    """The most that the processes of a contestant were seen to hold."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.each: dict[int, Memory] = {}
        self.all_anonymous = 0.0
        """Of all processes at once, launchers included."""

    def look(self) -> None:
        """Read the memory of the process and its descendants."""
        total = 0.0
        with contextlib.suppress(psutil.Error):
            for pid in (self.root, *(child.pid for child in psutil.Process(self.root).children(recursive=True))):
                with contextlib.suppress(OSError, KeyError, psutil.Error):
                    now = read_memory(pid)
                    total += now.anonymous
                    self.each[pid] = _greatest([now, self.each.get(pid, now)])
        self.all_anonymous = max(self.all_anonymous, total)


def _greatest(memories: Sequence[Memory]) -> Memory:
    return Memory(max(each.resident for each in memories), max(each.anonymous for each in memories))


@dataclass(frozen=True)
class Start:
    """One start of a contestant."""

    seconds: float
    """From the start of its first process to the end of its first step on all ranks."""
    rank: Memory
    """Of the rank that has most."""
    all_anonymous: float


def watch_crew(crew: Crew) -> Start:
    """Look at a crew's memory while it takes a few steps."""
    watch = MemoryWatch(crew.process.pid)
    for _ in range(3):
        crew.ask(1)
        for _ in range(6):
            watch.look()
            time.sleep(0.02)
        crew.hear(1)
    return Start(crew.first_step_s, _greatest([watch.each[pid] for pid in crew.pids]), watch.all_anonymous)


def start_train(folder: Path) -> Start:
    """Start the verb `train` on the same model and data; its first step is done when its metrics have a line."""
    folder.mkdir()
    (folder / "job.toml").write_text(_job_file())
    command = [str(Path(sys.executable).with_name("samestep")), "train", str(folder / "job.toml"), "--layout=dp=2"]
    metrics = folder / "run" / "metrics.jsonl"
    with (folder / "log").open("w+") as log:
        began = time.perf_counter()
        process = _start([*command, "--steps=4", f"--out={metrics.parent}"], log)
        try:
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None:
                    raise SystemExit(f"samestep train took no step:\n{Path(log.name).read_text()}")
                time.sleep(0.005)
            seconds = time.perf_counter() - began
            watch = MemoryWatch(process.pid)
            while process.poll() is None:
                watch.look()
                time.sleep(0.02)
        finally:
            _finish(process)
    ranks = [memory for pid, memory in watch.each.items() if pid != process.pid]
    return Start(seconds, _greatest(ranks), watch.all_anonymous)


def _job_file() -> str:
    train = {"global_batch": 2 * BATCH, "steps": STEPS, "evaluate_samples": 0, "sample_tokens": 0}
    return tomli_w.dumps(
        {
            "model": {"source": "peers:build", "config": {"size": "middle"}},
            "data": {"source": "peers:windows", "held_out": 0.0},
            "train": {"loss": "peers:loss_sum", **train},
            "optimizer": {"name": "peers:adamw", "clip_norm": CLIP_NORM},
            "run": {"device": "cpu"},
        }
    )


def warm_file_cache() -> None:
    """Import everything once, so that no contestant's start pays for reading it from the disk."""
    modules = "accelerate, lightning_fabric, samestep.training, torch.distributed.run, peers"
    _finish(_start([sys.executable, "-c", f"import {modules}"], None))


# -- beside the peers ------------------------------------------------------------------------------

PAIRS = ("samestep", "ddp", "accelerate", "fabric")
CONTROL = "ddp again"
ALONE = ("samestep", "plain")


def measure_peers(effort: Effort, folder: Path, say: Callable[[str], None]) -> list[Figure]:
    """Compare steps, memory and starts: two ranks against the peers, one rank against a plain loop."""
    names = (*PAIRS, CONTROL) if effort.control else PAIRS
    two: dict[str, list[Turn]] = {name: [] for name in names}
    one: dict[str, list[Turn]] = {name: [] for name in ALONE}
    starts: dict[str, list[Start]] = {name: [] for name in ("train", *PAIRS)}
    if effort.warms_up:
        warm_file_cache()
    for generation in range(effort.generations):
        say(f"beside the peers, generation {generation + 1} of {effort.generations}")
        starts["train"].append(start_train(folder / f"train-{generation}"))
        pairs: Wanted = {name: (name.removesuffix(" again"), 2, "middle", 2 * BATCH) for name in names}
        with crews(pairs, folder, one_by_one=True) as started:
            check_losses(started)
            take_turns(started, two, effort.two_ranks_s, effort.least_rounds)
            for name in PAIRS:
                starts[name].append(watch_crew(started[name]))
        with crews({name: (name, 1, "middle", BATCH) for name in ALONE}, folder) as started:
            check_losses(started)
            take_turns(started, one, effort.one_rank_s, effort.least_rounds)
    return [*step_figures("two ranks", two), *step_figures("one rank", one), *start_figures(starts)]


def check_losses(started: dict[str, Crew], steps: int = 5) -> None:
    """Assert that all crews do equal work: the same losses over the first steps, of which one is done."""
    for crew in started.values():
        crew.take(steps - 1)
    reference = next(iter(started.values())).losses
    for name, crew in started.items():
        apart = max(abs(ours - theirs) for ours, theirs in zip(reference, crew.losses, strict=True))
        assert apart <= SAME_LOSS, f"{name} does other work: losses {crew.losses} against {reference}"


def take_turns(started: dict[str, Crew], times: dict[str, list[Turn]], seconds: float, least: int) -> None:
    """Let the crews take turns for some time; each round begins with another one."""
    for first in rounds(seconds, least):
        for name in _rotated(list(started), first):
            times[name].append(started[name].take(TURN, warm_up=1))


def _rotated(keys: Sequence[str], by: int) -> list[str]:
    return [keys[(index + by) % len(keys)] for index in range(len(keys))]


def rounds(seconds: float, least: int) -> Iterator[int]:
    """Count rounds until the time is over."""
    began = time.monotonic()
    for index in itertools.count():
        if index >= least and time.monotonic() - began > seconds:
            return
        yield index


def _ratios(over: Iterable[float], under: Iterable[float]) -> tuple[float, ...]:
    return tuple(one / other for one, other in zip(over, under, strict=True))


def step_figures(section: str, times: dict[str, list[Turn]]) -> list[Figure]:
    """Set samestep's turns against those of the others in the same round."""
    figures = []
    peers = [name for name in times if name not in ("samestep", CONTROL)]

    def add(what: str, values: Iterable[float], unit: str = "x", limit: float | None = None) -> None:
        numbers = tuple(values)
        aim, met = ("", None) if limit is None else (f"<= {limit:.4g}", statistics.median(numbers) <= limit)
        figures.append(Figure(section, what, numbers, unit, aim, met))

    def ratios(ours: str, theirs: str, of: Callable[[Turn], float]) -> tuple[float, ...]:
        return _ratios(map(of, times[ours]), map(of, times[theirs]))

    noise = ratios(CONTROL, "ddp", lambda turn: turn.seconds) if CONTROL in times else (1.0, 1.0)
    for peer in peers:
        # Accelerate and Fabric wrap DDP: no slower than one of two equal DDPs may be beside the other.
        limit = 1.02 if peer in ("ddp", "plain") else max(1.0, statistics.quantiles(noise, n=4)[-1])
        add(f"step time, samestep / {NAMES[peer]}", ratios("samestep", peer, lambda turn: turn.seconds), limit=limit)
    if CONTROL in times:
        add("step time, hand-written DDP / itself (noise)", noise)
    for peer in peers:
        add(f"CPU time of a step, samestep / {NAMES[peer]}", ratios("samestep", peer, lambda turn: turn.cpu_s))
    for name in ("samestep", *peers):
        add(f"step time, {NAMES[name]}", (turn.seconds * 1e3 for turn in times[name]), "ms")
    return figures


def start_figures(starts: dict[str, list[Start]]) -> list[Figure]:
    """Set samestep's starts and memory against the least of the others."""
    kinds: tuple[tuple[str, str, str, Callable[[Start], float], bool], ...] = (
        ("start-up", "process start to the end of the first step", "s", lambda start: start.seconds, True),
        ("memory", "peak resident memory of a rank", "MB", lambda start: start.rank.resident / 1e6, True),
        ("memory", "a rank without files (PSS)", "MB", lambda start: start.rank.anonymous / 1e6, False),
        ("memory", "all processes without files (PSS)", "MB", lambda start: start.all_anonymous / 1e6, False),
    )
    figures = []
    for section, what, unit, of, has_aim in kinds:
        values = {name: tuple(of(start) for start in known) for name, known in starts.items()}
        least = min(statistics.median(values[name]) for name in PAIRS if name != "samestep")
        for name, its in values.items():
            ours = name in ("samestep", "train") and has_aim
            aim, met = (f"< {least:.4g}", statistics.median(its) < least) if ours else ("", None)
            figures.append(Figure(section, f"{what}, {NAMES[name]}", its, unit, aim, met))
    return figures


# -- scaling ---------------------------------------------------------------------------------------


def measure_scaling(effort: Effort, folder: Path, say: Callable[[str], None]) -> list[Figure]:
    """Compare one rank with two on the same global batch, and with what this machine gives two processes at once.

    The crews of two ranks change places from round to round, for the one behind a crew of a single rank finds the
    second core idle. A second crew of the hand-written loop shows how far apart two equal crews are.
    """
    contestants = {"alone": ("samestep", 1), "other": ("samestep", 1), "pair": ("samestep", 2), "ddp": ("ddp", 2)}
    if effort.control:
        contestants["control"] = ("ddp", 2)
    wanted: Wanted = {key: (*words, "heavy", HEAVY_BATCH) for key, words in contestants.items()}
    pairs = [key for key, (_, ranks) in contestants.items() if ranks == 2]
    turns: dict[str, list[Turn]] = {key: [] for key in ("before", *pairs, "after")}
    both = []
    for generation in range(effort.generations):
        say(f"scaling, generation {generation + 1} of {effort.generations}")
        with crews(wanted, folder) as started:
            check_losses(started, steps=2)
            for index in rounds(effort.scaling_s, effort.least_rounds):
                # One rank on either side of two: the machine's speed may drift within a round.
                turns["before"].append(started["alone"].take(1))
                for key in _rotated(pairs, index):
                    turns[key].append(started[key].take(1))
                turns["after"].append(started["alone"].take(1))
                both.append(_at_once([started["alone"], started["other"]]))
    seconds = {key: [turn.seconds for turn in taken] for key, taken in turns.items()}
    cpu_s = {key: [turn.cpu_s for turn in taken] for key, taken in turns.items()}
    alone_s, alone_cpu_s = (
        [(first + last) / 2 for first, last in zip(of["before"], of["after"], strict=True)] for of in (seconds, cpu_s)
    )
    return scaling_figures(
        alone_s,
        {key: seconds[key] for key in pairs},
        [sum(alone / turn.seconds for turn in two) for alone, two in zip(alone_s, both, strict=True)],
        {key: [spent / alone for spent, alone in zip(cpu_s[key], alone_cpu_s, strict=True)] for key in pairs},
    )


def scaling_figures(
    alone_s: Sequence[float],
    pair_s: Mapping[str, Sequence[float]],
    ceiling: Sequence[float],
    work: Mapping[str, Sequence[float]],
) -> list[Figure]:
    """Set crews of two ranks against one rank, against each other, and against what the machine gives."""
    scaling, ddp = (_ratios(alone_s, pair_s[key]) for key in ("pair", "ddp"))
    reached = tuple(100 * ours for ours in _ratios(scaling, ceiling))
    beside = _ratios(pair_s["ddp"], pair_s["pair"])
    met = statistics.median(beside) >= 0.98
    figures = [Figure("scaling", "tokens/s of two ranks, samestep / hand-written DDP", beside, "x", ">= 0.98", met)]
    if "control" in pair_s:
        equal = _ratios(pair_s["ddp"], pair_s["control"])
        figures.append(Figure("scaling", "tokens/s of two ranks, two copies of hand-written DDP", equal, "x"))
    return [
        *figures,
        Figure("scaling", "tokens/s, samestep dp=2 / dp=1", scaling, "x"),
        Figure("scaling", "tokens/s, hand-written DDP on two ranks / samestep dp=1", ddp, "x"),
        Figure("scaling", "ceiling: two independent one-rank processes / one", tuple(ceiling), "x"),
        Figure("scaling", "part of the ceiling that dp=2 reaches", reached, "%"),
        Figure("scaling", "CPU time of a step, samestep dp=2 over both ranks / dp=1", tuple(work["pair"]), "x"),
        Figure("scaling", "CPU time of a step, DDP over both ranks / samestep dp=1", tuple(work["ddp"]), "x"),
        Figure("scaling", "step time, samestep dp=1", tuple(alone_s), "s"),
        Figure("scaling", "step time, samestep dp=2", tuple(pair_s["pair"]), "s"),
    ]


def _at_once(pair: Sequence[Crew]) -> list[Turn]:
    for crew in pair:
        crew.ask(1)
    return [crew.hear(1) for crew in pair]


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
        table = Table(*HEADS, title=section, title_justify="left", width=116)
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
        f"Llama-like, hidden {size.hidden}, {size.layers} layers, {BATCH} x {size.tokens} tokens per rank, float32, fused "
        f"AdamW, clipped at {CLIP_NORM}, gloo, one thread per rank. Scaling: hidden {SIZES['heavy'].hidden}, "
        f"{SIZES['heavy'].layers} layers, {HEAVY_BATCH} x {SIZES['heavy'].tokens} tokens over all ranks. "
        f"Versions: {versions}, Python {platform.python_version()}. {cores} cores, load before {os.getloadavg()[0]:.1f}. "
        "Spread: quartiles over the turns, or least to greatest of fewer than four."
    )


SECTIONS = {"peers": measure_peers, "scaling": measure_scaling}


def main() -> None:
    """Measure, print, write files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter, with more spread")
    parser.add_argument("--generations", type=int, metavar="N", help="start all contestants anew so many times")
    parser.add_argument("--only", choices=SECTIONS, help="measure only this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all values")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")
    words = parser.parse_args()
    if missing := [name for name in ("accelerate", "lightning_fabric") if importlib.util.find_spec(name) is None]:
        parser.error(
            f"{' and '.join(missing)} missing, with which samestep is compared: pip install 'samestep[bench]' works"
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    circumstances = describe()
    console.print(circumstances)
    effort = QUICK if words.quick else THOROUGH
    if words.generations:
        effort = dataclasses.replace(effort, generations=words.generations)
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
