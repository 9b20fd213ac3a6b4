"""Processor time of the session: what `make test` costs, whatever else the machine does meanwhile.

It is what the pytest process and every process below it have used: the children that were waited for, by `getrusage`,
and those that still run, such as the ranks of a pool, by /proc. What outlives its parent is not seen.
`pytest --costs 30` says it of the thirty dearest tests, and which processes have used it:

```
   3.61   0.04   3.57   0.00  tests/parity/test_update_rules.py::test_rules_run_equal[dp=2 zero=1-rule muon]
```
are the seconds of all processes, of pytest's own, of the ranks of pools, and of others.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Generator

import psutil
import pytest

from tests import pool


def used_s() -> float:
    """Return the seconds of processor time, user and system, that this process and all below it have used so far."""
    own = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    total_s = sum(usage.ru_utime + usage.ru_stime for usage in own)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it was waited for meanwhile
            total_s += sum(process.cpu_times()[:4])  # its own, and that of the children that it waited for
    return total_s


class Costs:
    """Prints the dearest tests of a session at its end, and what part of their processor time is that of pool ranks."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._rows: list[tuple[float, float, float, float, str]] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Note what a test uses, its fixtures included."""
        before = _shares()
        done = yield
        all_s, own_s, ranks_s = (after - start for after, start in zip(_shares(), before, strict=True))
        self._rows.append((all_s, own_s, ranks_s, all_s - own_s - ranks_s, item.nodeid))
        return done

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        terminalreporter.write_sep(
            "=", f"{self._count} dearest tests: seconds of processor time, pytest's own, pool ranks', others'"
        )
        for row in sorted(self._rows, reverse=True)[: self._count]:
            terminalreporter.write_line("{:7.2f}{:7.2f}{:7.2f}{:7.2f}  {}".format(*row))


def _shares() -> tuple[float, float, float]:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return used_s(), own.ru_utime + own.ru_stime, pool.used_s_of_all()
