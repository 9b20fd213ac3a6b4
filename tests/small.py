"""Small runs of the command `train`, called in the warm pytest process, which forks its workers; and what they leave."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import os
import re
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from samestep import cli
from samestep.job_files import load
from samestep.runtime.processes import join
from samestep.training.workload import Workload
from tests.traced import families_once

importlib.import_module(
    "numpy.ma"
)  # which each worker that resumes would import anew, and the first one of each run the other
with contextlib.suppress(ImportError):
    importlib.import_module("tensorboardX")
SMALL = {
    "model.config.hidden_size": 16,
    "model.config.intermediate_size": 40,
    "model.config.num_hidden_layers": 2,
    "model.config.num_attention_heads": 4,
    "model.config.num_key_value_heads": 2,
    "model.config.max_position_embeddings": 64,
    "data.sequence_length": 16,
    "train.global_batch": 8,
    "train.steps": 6,
    "train.evaluate_samples": 0,
    "train.sample_tokens": 0,
    "train.watch_every": 0,
    "schedule.warmup_steps": 2,
    "checkpoint.every": 0,
}
TIMINGS = (
    "data_wait_s",
    "step_s",
    "tokens_per_s",
    "memory_bytes",
    "reserved_bytes",
    "tflops_per_device",
    "mfu",
    "time",
)


def settings(**changes: Any) -> list[str]:
    """The words that make the default job a small one; in `changes`, `__` stands for a dot."""
    keys = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    return [word for key, value in keys.items() for word in ("--set", f"{key}={_toml(value)}")]


def train(*words: str | Path, **changes: Any) -> int:
    """Run `samestep train` on a small job; return its exit status."""
    return main("train", *settings(**changes), *words)


def main(*words: str | Path) -> int:
    """Run the command line here; with the group of an earlier run of one rank it would spawn its workers, at ten times the cost of forks."""
    join.leave()
    with warnings.catch_warnings(), families_once():
        warnings.filterwarnings("ignore", message=".*share . core")
        try:
            return cli.main([str(word) for word in words])
        except SystemExit as end:  # argparse's way
            return int(end.code or 0)


def without_code(complaint: str) -> str:
    """What the command line says of an error, without the code at the end of its first line."""
    return re.sub(r" \[[a-z0-9_-]+\]\n", "\n", complaint, count=1)


def metrics(folder: Path, *, timings: bool = False) -> list[dict[str, Any]]:
    """The lines of a run's log; without what differs between two equal runs."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if timings or key not in TIMINGS} for row in rows]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in metrics(folder)]


def num_steps(folder: Path) -> int:
    """The number of steps in a run's log."""
    log = folder / "metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder and its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def stored(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, as its files hold them."""
    return {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}


def whole(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, the runs of each put together: the same in every layout."""
    runs: dict[str, dict[int, Tensor]] = {}
    for name, tensor in stored(checkpoint).items():
        kind, _, rest = name.partition("/")
        if kind == "buffer":
            runs[name] = {0: tensor}
            continue
        param, start, *key = rest.split("/")
        runs.setdefault("/".join([kind, param, *key]), {})[int(start)] = tensor
    return {
        name: torch.cat([parts[start] for start in sorted(parts)])
        if parts[min(parts)].dim() == 1
        else parts[min(parts)]
        for name, parts in runs.items()
    }


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Both hold the same tensors, to the bit."""
    assert left.keys() == right.keys()
    assert not [name for name in left if not torch.equal(left[name], right[name])]


def in_background(words: list[str], folder: Path, namespace: str = "", **variables: object) -> int:
    """Run the command line in a fork of this process; return its pid. What it says goes to `folder`/out and err.

    In a network namespace, if one is given, and with variables of its environment. A test that calls it ends with `end_background`, whatever happens.
    """

    if words[0] in ("train", "verify") and set(settings()[:2]) <= set(words):
        _trace_small()

    def command() -> int:
        os.environ.update({name: str(value) for name, value in variables.items()})
        if namespace:
            enter_namespace(namespace)
        return main(*words)

    return forked(command, folder)


@functools.cache
def _trace_small() -> None:
    """Trace the small model here, once, of which each fork would trace its own before its first step."""
    sets = [word for word in settings() if word != "--set"]
    with families_once():
        Workload(load(Path(__file__).parents[1] / "jobs" / "default.toml", sets))


def script(path: Path, words: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Run a script in a fork of this process, which has imported what a new one would take 3 s of processor time for.

    It runs where this process is, and an error is printed as the interpreter does. Return its exit status, and what it says on its standard output and errors.
    """

    def run() -> int:
        warnings.resetwarnings()
        sys.argv, sys.path[:0], sys.excepthook = [str(path), *words], [str(path.parent)], sys.__excepthook__
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
        except BaseException as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename != str(path):
                trace = trace.tb_next
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            return 1
        return 0

    status = status_of(forked(run, folder), 500.0)
    return status, (folder / "out").read_text(encoding="utf-8"), (folder / "err").read_text(encoding="utf-8")


def of_rank_0(printed: str) -> str:
    """Return what rank 0 of a script printed: lines of other ranks begin with their number."""
    return "\n".join(line for line in printed.splitlines() if not re.match(r"rank \d", line))


def forked(action: Callable[[], int], folder: Path) -> int:
    """Run an action in a fork of this process, which ends with the status it returns; return its pid."""
    folder.mkdir(parents=True, exist_ok=True)
    join.leave()
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            os.setpgid(0, 0)
            for descriptor, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
            status = action()
        finally:
            os._exit(status)
    _background.add(pid)
    return pid


def enter_namespace(namespace: str) -> None:
    """Move this process into a network namespace."""
    with Path("/run/netns", namespace).open() as entered:
        assert ctypes.CDLL(None).setns(entered.fileno(), _CLONE_NEWNET) == 0


_CLONE_NEWNET = 0x40000000
_background: set[int] = set()


def end_background() -> None:
    """Kill what is left of the processes of `in_background`; their workers die with them."""
    for pid in list(_background):
        os.kill(pid, signal.SIGKILL)
        status_of(pid)


def wait_for(happened: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def status_of(pid: int, limit_s: float = 60.0) -> int:
    """Wait for a process of `in_background`; return its exit status."""
    end = time.monotonic() + limit_s
    while True:
        gone, status = os.waitpid(pid, os.WNOHANG)
        if gone:
            _background.discard(pid)
            return os.waitstatus_to_exitcode(status)
        assert time.monotonic() < end, f"process {pid} still runs"
        time.sleep(0.02)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)  # of numbers, text and lists: TOML writes them alike
