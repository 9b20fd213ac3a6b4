"""Which lines of `src/` each test reaches: a plugin of pytest, `make reach`.

It follows the process of the tests, ranks of the pools and of runs, and processes that a test starts. Each appends to a file of
`build/reached/` what a row has reached, as `ROW TAB FILE TAB LINES`. A process that is killed loses what it has reached since its last job.
The tracer is the one of `coverage`, in C: it takes about a tenth of the time of a session.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "reached"
ROW = "SAMESTEP_TEST_ROW"
"""The variable by which a process that a test starts knows the row."""
BETWEEN = "between"
"""What is reached between two rows, by fixtures of a file or of a session."""
_START = f"import os\nif {ROW!r} in os.environ:\n    from benchmarks import reached\n    reached.start()\n"
_SOURCE = f"{ROOT / 'src' / 'samestep'}/"
_reached: dict[str, set[int]] = {}
"""The lines that this process has reached in the row, by file; the tracer writes it."""
_dispositions: dict[str, Any] = {}
_tracers: list[Any] = []


def rows_of(places: Iterable[tuple[str, int]], folder: Path = FOLDER) -> dict[tuple[str, int], set[str]]:
    """Return the rows that reach each place, a file below src/samestep and a line."""
    asked: dict[str, set[int]] = defaultdict(set)
    for file, line in places:
        asked[file].add(line)
    rows: dict[tuple[str, int], set[str]] = {(file, line): set() for file, lines in asked.items() for line in lines}
    for path in folder.glob("*.txt"):
        for text in path.read_text(encoding="utf-8").splitlines():
            row, *words = text.split("\t")
            if row != BETWEEN and len(words) == 2 and words[0] in asked:  # else a process was killed while it wrote
                for line in asked[words[0]].intersection(map(int, words[1].split(","))):
                    rows[words[0], line].add(row)
    return rows


def start() -> None:
    """Follow this process, and all that it forks."""
    if not _tracers:
        os.register_at_fork(after_in_child=_clear)
        leave = os._exit

        def leaving(status: int) -> None:
            note()
            leave(status)

        os._exit = leaving  # type: ignore[assignment]
        atexit.register(note)
        threading.settrace(_follow_thread)
        _follow()


def note(row: str | None = None) -> None:
    """Write down what was reached in the row, and begin another one."""
    files = {name: sorted(lines) for name, lines in list(_reached.items()) if lines}
    _clear()
    text = "".join(
        f"{os.environ[ROW]}\t{name.removeprefix(_SOURCE)}\t{','.join(map(str, lines))}\n"
        for name, lines in files.items()
    )
    if text:
        with (FOLDER / f"{os.getpid()}.txt").open("a", encoding="utf-8") as target:
            target.write(text)
    if row is not None:
        os.environ[ROW] = row


def _clear() -> None:
    for lines in _reached.values():
        lines.clear()


def _follow() -> Any:
    tracer = importlib.import_module("coverage.tracer")
    following = tracer.CTracer()
    following.data, following.trace_arcs = _reached, False
    following.lock_data = following.unlock_data = lambda: None
    following.should_trace, following.should_trace_cache = _disposition, _dispositions
    following.warn = following.disable_plugin = lambda *words: None
    following.concur_id_func = following.should_start_context = following.switch_context = None
    following.file_tracers, following.check_include = {}, None
    _tracers.append(following)
    return following.start()


def _disposition(name: str, _: Any) -> Any:
    answer = importlib.import_module("coverage.tracer").CFileDisposition()
    answer.original_filename = answer.canonical_filename = answer.source_filename = name
    answer.trace, answer.reason = name.startswith(_SOURCE), ""
    answer.file_tracer, answer.has_dynamic_filename = None, False
    return answer


def _follow_thread(frame: Any, event: str, value: Any) -> Any:
    sys.settrace(None)
    following = _follow()
    return following(frame, event, value) if following else None


# -- the plugin ------------------------------------------------------------------------------------


class Job:
    """A function of a pool's ranks in the row that sends it."""

    def __init__(self, row: str, function: Callable[..., Any]) -> None:
        self.row, self.function = row, function

    def __call__(self, rank: int, world: int, *args: Any) -> Any:
        note(self.row)
        try:
            return self.function(rank, world, *args)
        finally:
            note()


def pytest_configure() -> None:
    from tests import laboratory, pool

    run = pool.Pool.run
    pool.Pool.run = lambda ranks, function, *args: run(ranks, Job(os.environ[ROW], function), *args)  # type: ignore[method-assign]
    laboratory.trace_ahead = lambda: None  # or one row would reach what the others examine
    site = FOLDER / "site"
    site.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text(_START, encoding="utf-8")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(site), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    )
    os.environ[ROW] = BETWEEN
    start()


def pytest_runtest_logstart(nodeid: str) -> None:
    note(nodeid)


def pytest_runtest_logfinish() -> None:
    note(BETWEEN)
