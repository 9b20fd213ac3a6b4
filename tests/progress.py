"""With `pytest -q`: one line for each file when its last test is done, which a log of a CI keeps readable.

```
[ 43%]    12:31  tests/parity/test_axes.py  31 tests, 1 failed, 48 s, processor 52 s
...
by folder: parity 700 s, code 60 s
812 s of processor time, 640 s elapsed
```
The processor's seconds are those of all processes (`processor_time.py`); the last line counts imports and collection too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator

import pytest

from tests import costs, processor_time


class Progress:
    """The progress of a session, in the order of its files; passed tests print nothing of their own."""

    def __init__(self, reporter: pytest.TerminalReporter, *, keeps_costs: bool = False) -> None:
        self._reporter, self._keeps_costs = reporter, keeps_costs
        self._start_s = time.monotonic()
        self._file_start_s = self._begin_s = self._start_s
        self._file_start_used_s = 0.0
        self._num_tests = 0
        self._done = 0
        self._left: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._used_s_of_folder: dict[str, float] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the tests of each file."""
        self._left = Counter(_file_of(item.nodeid) for item in session.items)
        self._of_file = Counter(self._left)
        self._num_tests = len(session.items)
        self._start_s = self._file_start_s = time.monotonic()
        self._file_start_used_s = processor_time.used_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Generator[None, tuple[str, str, str], tuple[str, str, str]]:
        """Keep the category that is counted at the end, and print no letter."""
        category, _, word = yield
        return category, "", "" if category == "passed" else word

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Name a failure at once."""
        if report.failed:
            self._failed[_file_of(report.nodeid)] += 1
            self._reporter.write_line(f"FAILED {report.nodeid}, after {report.duration:.0f} s", red=True)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Print the line of a file whose last test this was."""
        file = _file_of(nodeid)
        self._done += 1
        self._left[file] -= 1
        if self._left[file]:
            return
        now_s, used_s = time.monotonic(), processor_time.used_s()
        minutes, seconds = divmod(int(now_s - self._start_s), 60)
        failed = f", {self._failed[file]} failed" if self._failed[file] else ""
        self._reporter.write_line(
            f"[{100 * self._done // self._num_tests:3d}%] {minutes:4d}:{seconds:02d}  {file}  "
            f"{self._of_file[file]} test{'s' * (self._of_file[file] > 1)}{failed}, {now_s - self._file_start_s:.0f} s, "
            f"processor {used_s - self._file_start_used_s:.0f} s"
        )
        if self._keeps_costs:
            costs.keep(file, used_s - self._file_start_used_s, self._of_file[file])
        folder = file.removeprefix("tests/").rpartition("/")[0]
        self._used_s_of_folder[folder] = self._used_s_of_folder.get(folder, 0.0) + used_s - self._file_start_used_s
        self._file_start_s, self._file_start_used_s = now_s, used_s

    def pytest_unconfigure(self) -> None:
        """End with what all of it cost."""
        elapsed_s = time.monotonic() - self._begin_s
        dearest = sorted(self._used_s_of_folder.items(), key=lambda one: -one[1])
        if dearest:
            self._reporter.write_line(
                "by folder: " + ", ".join(f"{folder} {used_s:.0f} s" for folder, used_s in dearest)
            )
        self._reporter.write_line(f"{processor_time.used_s():.0f} s of processor time, {elapsed_s:.0f} s elapsed")


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]
