"""A plugin of pytest that records what comes of each row: `pytest -p tests.frozen.recorder --rows-into FILE [--go-on] PATH ...`.

An error of samestep counts for a row where it reaches code of tests with no code of samestep above it in the calls: raised to the test, or
to what it calls in `tests/`, from this process or from ranks and workers; it counts too where the command line prints its code. Errors
that stay within a rank, or within samestep, do not count. They are seen by `sys.settrace`, whose hook is set in frames of `tests/` alone.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import samestep
from samestep.errors import SamestepError
from samestep.layout import Layout
from samestep.output.results import VerbFailure
from tests import time_limit
from tests.frozen import table

_TESTS, _OURS = f"{table.TESTS}/", f"{Path(samestep.__file__).parent}/"
PATIENCE = 6
"""How many times as long as otherwise a row may take: rows are recorded at the lowest priority."""
EVERY_S = 60.0
"""Seconds after which rows are written, though their file is not done."""
_AHEAD = ("trace_ahead", "warm_up")
"""Functions that work for other tests too: which of them calls them first is chance."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rows-into", metavar="FILE", help="record what comes of each row in this file")
    parser.addoption("--go-on", action="store_true", help="leave out rows that the file has of this state of src")


def pytest_configure(config: pytest.Config) -> None:
    if given := config.getoption("--rows-into"):
        config.pluginmanager.register(Recorder(Path(given), goes_on=config.getoption("--go-on")))


class Codes:
    """The codes of the errors that reach a test while it runs."""

    def __init__(self) -> None:
        self._codes: set[str] | None = None
        self._printed = VerbFailure.text, VerbFailure.to_record
        os.register_at_fork(after_in_child=self.close)

    def open(self) -> None:
        """Begin with no code."""
        codes = self._codes = set[str]()
        text, to_record = self._printed

        def noting(shown: Callable[[VerbFailure], Any]) -> Callable[[VerbFailure], Any]:
            def printed(failure: VerbFailure) -> Any:
                if isinstance(failure.error, SamestepError):
                    codes.add(failure.error.code)
                return shown(failure)

            return printed

        VerbFailure.text = property(noting(text.fget))  # type: ignore[assignment, arg-type]
        VerbFailure.to_record = noting(to_record)  # type: ignore[method-assign]
        sys.settrace(self._entered)

    def close(self) -> set[str]:
        """End, and return the codes."""
        sys.settrace(None)
        VerbFailure.text, VerbFailure.to_record = self._printed  # type: ignore[method-assign]
        codes, self._codes = self._codes, None
        return codes or set()

    def _entered(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(_TESTS):
            return None
        frame.f_trace_lines = False
        return self._within

    def _within(self, frame: FrameType, event: str, raised: Any) -> Any:
        if (
            event == "exception"
            and isinstance(raised[1], SamestepError)
            and self._codes is not None
            and _is_outside(frame)
        ):
            self._codes.add(raised[1].code)
        return self._within


def _is_outside(frame: FrameType | None) -> bool:
    """Return whether no function above is one of samestep, or works for several tests."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS) or frame.f_code.co_name in _AHEAD:
            return False
        frame = frame.f_back
    return True


def layout_of(item: Any) -> str:
    """Return the layouts that a row names, in the order of its parameters."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return ", ".join(dict.fromkeys(str(value) for value in values if _is_layout(value)))


def _is_layout(value: object) -> bool:
    if isinstance(value, str) and "=" in value:
        try:
            Layout(value)
        except SamestepError:
            return False
        return True
    return isinstance(value, Layout)


class Recorder:
    """Records a session's rows, and writes them when a file of tests is done."""

    def __init__(self, path: Path, *, goes_on: bool) -> None:
        self._path, self._goes_on, self._commit, self._codes = path, goes_on, table.commit(), Codes()
        self._done = _of_this_source(table.load(path)) if goes_on else set[str]()
        self._rows: table.Rows = {}
        self._left = Counter[str]()
        self._written_s = time.monotonic()

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, object, object]:
        """Note which rows there are, those that wait for the night too, and leave out those that are recorded."""
        names = [item.nodeid for item in items]
        result = yield
        items[:] = [item for item in items if item.nodeid not in self._done]
        for item in items:
            limit_s = PATIENCE * time_limit._limit_of(item)
            item.add_marker(pytest.mark.time_limit(limit_s), append=False)
        self._left = Counter(item.nodeid.partition("::")[0] for item in items)
        if not self._goes_on:  # to compare: a frozen row that is none of these is gone
            self._path.with_suffix(".names").write_text("\n".join(names), encoding="utf-8")
        return result

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Watch the errors that reach a test."""
        self._codes.open()
        try:
            return (yield)
        finally:
            codes = self._codes.close()
            self._rows[item.nodeid] = table.Row(
                layout_of(item), table.rejected(codes) if codes else table.EQUAL, self._commit
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure or a skip, wherever it happens."""
        if report.failed or report.skipped:
            layout = self._rows[report.nodeid].layout if report.nodeid in self._rows else ""
            self._rows[report.nodeid] = table.Row(
                layout, table.FAILED if report.failed else table.SKIPPED, self._commit
            )

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write what is recorded when a file is done, and once a minute."""
        file = nodeid.partition("::")[0]
        self._left[file] -= 1
        if not self._left[file] or time.monotonic() > self._written_s + EVERY_S:
            self._write()

    def pytest_sessionfinish(self) -> None:
        """Write what is left, of a session that was stopped."""
        self._write()

    def _write(self) -> None:
        if self._goes_on:  # a row that fails by chance, as one that runs out of time, replaces no other outcome
            known = table.load(self._path)
            self._rows = {
                name: row for name, row in self._rows.items() if row.outcome != table.FAILED or name not in known
            }
        if self._rows:
            table.merge(self._rows, self._path)
        self._rows, self._written_s = {}, time.monotonic()


def _of_this_source(rows: table.Rows) -> set[str]:
    """Return the rows that ran at a commit with the sources of this one."""
    ours = table.git("rev-parse", "HEAD:src")
    same = {
        commit for commit in {row.commit for row in rows.values()} if table.git("rev-parse", f"{commit}:src") == ours
    }
    return {name for name, row in rows.items() if row.commit in same and row.outcome != table.FAILED}
