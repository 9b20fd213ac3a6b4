"""One thread a process, the pools of ranks, time limits and progress."""

from __future__ import annotations

import gc
import importlib
import os
import signal
from collections.abc import Generator, Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a fork with a used OpenMP pool hangs

import pytest
import torch
from hypothesis import settings

from samestep.runtime.processes import join
from tests import audit, covering, laboratory, processor_time, shard, time_limit, traced, turns
from tests import pool as pools
from tests.progress import Progress

torch.set_num_threads(1)
settings.register_profile("samestep", deadline=None)  # no test asserts on the clock
settings.load_profile("samestep")
gc.set_threshold(700, 10, 1000)
"""Old objects are looked through seldom: those of torch and of the traced models, which stay, took a tenth of a session's time."""


os.register_at_fork(after_in_child=gc.freeze)
"""A forked process looks through nothing that it has inherited, which would copy the pages too: it made each fork twice as dear."""


@pytest.hookimpl(trylast=True)  # once there is a reporter
def pytest_configure(config: pytest.Config) -> None:
    """Put the time limits to work, and with `-q` the lines of progress."""
    config.pluginmanager.register(time_limit)
    audit.install()  # before any rank is forked
    if config.getoption("--keep-costs") and (config.option.keyword or any("::" in word for word in config.args)):
        raise pytest.UsageError("--keep-costs keeps the cost of whole files: name files or folders, without -k and ::")
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None and config.get_verbosity() < 0:
        config.pluginmanager.register(Progress(reporter, keeps_costs=config.getoption("--keep-costs")))
    if (given := config.getoption("--shard")) is not None:
        config.option.every_layout = True
        if not given:  # who asks for one by its number wants all of it
            config.pluginmanager.register(shard.Limit())
    if count := config.getoption("--costs"):
        config.pluginmanager.register(processor_time.Costs(count))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-layout", action="store_true", help="run the nightly combinations too")
    parser.addoption("--no-skips", action="store_true", help="fail tests that skip")
    parser.addoption("--costs", type=int, default=0, help="print so many of the tests that use most processor time")
    parser.addoption("--keep-costs", action="store_true", help="write the costs of files to tests/costs.json; with -q")
    parser.addoption(
        "--shard",
        metavar="NUMBER",
        help="run a part of the nightly combinations alone, that of the commit where the number is empty: tests/shard.py",
    )
    parser.addoption(
        "--turn",
        metavar="NUMBER",
        help="of rows that take turns run those of one turn, that of the commit where the number is empty: tests/turns.py",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Take a skip for a failure where none is allowed."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--no-skips"):
        report.outcome, report.longrepr = "failed", f"--no-skips: {report.longreprtext}"
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the nightly combinations out, or all but a shard of them, and the tests for an accelerator where there is none.

    Tests with layouts of which `covering.needless` finds that others of their file hold the same are nightly, unless tests are asked for
    by name. With a turn, tests that wait for another one are left out too. A test that cannot run here is nobody's reason to leave one out.
    """
    able = [item for item in items if torch.cuda.is_available() or not item.get_closest_marker("gpu")]
    if not config.option.keyword and not any("::" in word for word in config.args):
        for item in covering.needless(able):
            item.add_marker(pytest.mark.nightly)
    waiting: set[pytest.Item] = set()
    if (turn := config.getoption("--turn")) is not None and not config.getoption("--every-layout"):
        waiting = set(turns.out_of_turn(able, shard.number_of(turn)))
    runs_nightly = config.getoption("--every-layout")
    left = [item for item in able if item not in waiting and (runs_nightly or not item.get_closest_marker("nightly"))]
    if (given := config.getoption("--shard")) is not None:
        nightly = [item for item in left if item.get_closest_marker("nightly")]
        left = [nightly[index] for index in shard.selected([item.nodeid for item in nightly], shard.number_of(given))]
    chosen = set(left)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = left


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let no collection of garbage look through what is imported by now, nor copy its pages on the ranks that are forked."""
    laboratory.note_ahead(session.items)
    gc.collect()
    gc.freeze()
    # To count two million objects takes a sixth of a second, of each plan and each worker that trains.
    gc.get_freeze_count = lambda: 1


@pytest.fixture(scope="module", autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """Leave the process group that runs of one rank have made in this process: no rank could be forked from it."""
    yield
    join.leave()


@pytest.fixture(scope="module", autouse=True)
def _what_stays_is_frozen() -> Iterator[None]:
    """Let no later collection look through what the tests of a file have left: late in a session a whole one took a second."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _specs_are_traced_here() -> Iterator[None]:
    with traced.specs_here():
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_pool_is_left() -> Iterator[None]:
    yield
    pools.close_all()


@pytest.fixture(scope="module", autouse=True)
def _no_idle_rank_is_busy() -> Iterator[None]:
    yield
    pools.close_busy()


@pytest.fixture(autouse=True)
def _samestep_runs_no_code() -> Iterator[None]:
    """Whatever a test loads, in its process or on any rank: samestep unpickles and runs none of it, and starts no process."""
    yield
    assert audit.by_samestep() == []


@pytest.fixture(scope="session")
def ranks_inherit_the_compiler() -> None:
    """Make the first graphs of a process here, of fixed and of any sizes: they import for 2 s, which each rank would do anew."""
    importlib.import_module("torch.distributed.tensor.experimental")
    for rows in (3, 4):
        x = torch.ones(rows, 2, requires_grad=True)
        torch.compile(lambda x: (x + x.shape[0]).sin(), backend="aot_eager", dynamic=rows > 3)(x).sum().backward()
    pools.close_all()


@pytest.fixture
def stop_signals() -> Iterator[None]:
    """The stop signals as a terminal leaves them: a shell that starts a command in the background ignores SIGINT.

    `run_workers` passes no signal on that is ignored, so a test that waits for the effect of one would wait for ever.
    """
    usual = dict.fromkeys(join.STOP_SIGNALS, signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    join.restore_signals(before)


@pytest.fixture
def nothing_is_left_running() -> Iterator[None]:
    """A test ends the processes of `small.in_background`, whatever happens."""
    from tests import small

    yield
    small.end_background()


@pytest.fixture(scope="session")
def pool2() -> pools.Pool:
    return pools.pool(2)


@pytest.fixture(scope="session")
def pool4() -> pools.Pool:
    return pools.pool(4)
