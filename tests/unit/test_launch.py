"""Starting and joining workers: places, results, environments of launchers, stop signals, sockets."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import os
import pdb
import pickle
import pty
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from samestep.building import drawn_rows
from samestep.errors import JobError, WorkerError
from samestep.program.ops import StepFlag
from samestep.runtime.processes import join as joining
from samestep.runtime.processes import local_workers, workers
from samestep.runtime.processes.join import RankInfo, join, leave
from samestep.runtime.processes.launch_info import LOOPBACK
from samestep.runtime.processes.this_host import keep_freed_memory
from samestep.runtime.processes.workers import run_workers
from tests import audit
from tests.pool import Pool
from tests.time_limit import OutOfTime

# ---------------------------------------------------------------- run_workers


def _sum_of_ranks(place: RankInfo, more: float) -> tuple[RankInfo, torch.Tensor, int]:
    total = torch.full((2,), place.rank + more, dtype=torch.float64)
    dist.all_reduce(total)
    return place, total, torch.get_num_threads()


def _own_listening_sockets(place: RankInfo) -> list[str]:
    dist.barrier()
    mine = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    elsewhere = torch.tensor([sum(ip not in ("127.0.0.1", "::1") for ip in mine)])
    dist.all_reduce(elsewhere)
    return mine + ["elsewhere"] * int(elsewhere.item())


def _seen(place: RankInfo, imported: str) -> tuple[Any, ...]:
    print(f"out {place.rank}", flush=True)
    warnings.warn(f"warning {place.rank}", UserWarning, stacklevel=1)
    hears_ends = signal.getsignal(signal.SIGCHLD) is not signal.SIG_DFL
    return *_sum_of_ranks(place, 0.5), _own_listening_sockets(place), hears_ends, imported in sys.modules


def test_what_workers_are_given_and_that_they_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 alone speaks. The handler of a parent's loader would raise where reader processes of a rank end with it."""
    imported, temporary = "imported_by_the_parent", tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / f"{imported}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(local_workers, "_IMPORTED_BY_STEPS", (imported,))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    handler = signal.signal(signal.SIGCHLD, lambda *_: None)
    before = {number: signal.getsignal(number) for number in joining.STOP_SIGNALS}
    variables, children = dict(os.environ), psutil.Process().children()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            found = run_workers(_seen, (imported,), ranks=2, timeout_s=60)
    finally:
        signal.signal(signal.SIGCHLD, handler)
    place, total, threads, listening, hears_ends, has_imported = found
    assert place == RankInfo(0, 0, 2, 2, torch.device("cpu"))
    assert total.tolist() == [2.0, 2.0]
    assert (threads, hears_ends, has_imported) == (1, False, True)
    assert listening
    assert set(listening) <= {"127.0.0.1", "::1"}
    out, err = capfd.readouterr()
    assert "out 0" in out
    assert "out 1" not in out
    assert "warning 1" not in err
    assert not dist.is_initialized()
    assert list(temporary.iterdir()) == []
    assert psutil.Process().children() == children
    assert {number: signal.getsignal(number) for number in joining.STOP_SIGNALS} == before
    assert dict(os.environ) == variables


_BLOCKS, _BLOCK_BYTES = 10, 20 << 20


def _faults_of_a_step(place: RankInfo) -> float:
    """Return how many pages a process asks the system for, each time that it writes blocks and frees them."""
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    library.free.argtypes = (ctypes.c_void_p,)

    def step() -> None:
        blocks = [library.malloc(_BLOCK_BYTES) for _ in range(_BLOCKS)]
        for block in blocks:
            ctypes.memset(block, 1, _BLOCK_BYTES)
        for block in reversed(blocks):
            library.free(block)

    for _ in range(3):  # the heap grows
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 3


@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "1"), ("GLIBC_TUNABLES", "glibc.malloc.top_pad=1")]
)
def test_the_users_own_thresholds_stay(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory()


def _all_places(place: RankInfo) -> list[tuple[int, int, int]]:
    print("rank", place.rank, flush=True)
    mine = torch.tensor([place.rank, place.local_rank, place.ranks_per_node])
    everybodys = [torch.empty_like(mine) for _ in range(place.world_size)]
    dist.all_gather(everybodys, mine)
    return [tuple(one.tolist()) for one in everybodys]


def test_ranks_per_node_is_a_pretence_that_the_caller_may_make_and_quiet_silences_all(
    capfd: pytest.CaptureFixture[str],
) -> None:
    places = run_workers(_all_places, ranks=2, ranks_per_node=1, timeout_s=60, quiet=True)
    assert places == [(0, 0, 1), (1, 0, 1)]
    assert "".join(capfd.readouterr()) == ""
    with pytest.raises(JobError, match=r"ranks_per_node=2 does not divide the 3 ranks. Use 1, 3"):
        run_workers(_all_places, ranks=3, ranks_per_node=2)


def _write_down(place: RankInfo, folder: Path) -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    (folder / str(place.local_rank)).write_text(f"rank {place.rank} of {place.world_size} sums {total.item()}")


def test_workers_apart_never_meet(tmp_path: Path) -> None:
    run_workers(_write_down, (tmp_path,), ranks=2, isolated=True, timeout_s=60)
    assert [(tmp_path / name).read_text() for name in "01"] == ["rank 0 of 1 sums 1.0"] * 2


def _sum_and_unpickle(place: RankInfo, more: float) -> tuple[RankInfo, torch.Tensor, int]:
    unpickled_by_samestep = functools.partial(pickle.loads, b"ctorch.nn\nModule\n(tR.")
    drawn_rows.call(unpickled_by_samestep, 0)
    return _sum_of_ranks(place, more)


def test_more_threads_are_spawned_and_what_they_load_is_found_as_in_forks() -> None:
    with audit.watched() as found:
        place, total, threads = run_workers(_sum_and_unpickle, (1.0,), ranks=1, threads=2, timeout_s=60)
    assert (place.world_size, total.tolist(), threads) == (1, [1.0, 1.0], 2)
    (one,) = audit.by_samestep()
    assert re.fullmatch(r"building/drawn_rows.py:\d+: pickle.find_class .*torch.nn.*", one)
    assert len(found) == 1
    with pytest.raises(JobError, match="must be able to import main"):
        run_workers(lambda place: None, ranks=1, threads=2)


def test_workers_on_gpus_grow_the_memory_they_have_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

    def seen(device: str, **given: str) -> list[str | None]:
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        with local_workers._environment({}, joining.allocator_variables(device)):
            return [os.environ.get(name) for name in names]

    assert seen("cuda") == ["expandable_segments:True", None]
    assert names[0] not in os.environ  # of the process that starts them
    assert seen("cpu") == [None, None]
    assert seen("cuda", PYTORCH_ALLOC_CONF="max_split_size_mb:64") == ["max_split_size_mb:64", None]
    assert seen("cuda", PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64") == [None, "max_split_size_mb:64"]


def test_whoever_joins_by_itself_grows_memory_before_a_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)

    def used(device: torch.device) -> None:
        assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        raise KeyError("used")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", used)
    with pytest.raises(KeyError, match="used"):
        join("cuda", timeout_s=60)
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def _method(device: str, threads: int, work: Any = None) -> str:
    return local_workers.start_method(device, threads, work)


def test_fork_only_where_it_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _method("cpu", 1) == "fork"
    assert _method("cpu", 2) == "spawn"
    assert _method("cuda", 1) == "spawn"
    monkeypatch.setattr(local_workers, "_autograd_has_threads", lambda: True)
    assert _method("cpu", 1) == "spawn"


def test_functions_of_a_notebooks_cell_are_forked_or_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec("def main(place): return place.rank\nclass Data: pass", cell)
    vars(sys.modules["__main__"]).update(cell)
    bound = [(cell["main"], ()), (lambda place: None, ()), (_nothing, (cell["Data"](),)), (_nothing, ([cell["Data"]],))]
    for work in bound:
        assert _method("cuda", 1, work) == "fork", work
        with pytest.raises(JobError, match=r"^threads=4: forked workers have one thread.*Use .*threads=1"):
            _method("cpu", 4, work)
    assert _method("cuda", 1, (_nothing, (1,))) == "spawn"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for work in bound:
        with pytest.raises(JobError, match=r"^CUDA has started in this notebook.*a restarted kernel"):
            _method("cuda", 1, work)
    assert _method("cuda", 1, (_nothing, (1,))) == "spawn"


def test_cuda_that_was_only_asked_for_its_devices_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad_fork(device: torch.device) -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ...")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", bad_fork)
    with pytest.raises(JobError, match=r"^CUDA has started in this notebook"):
        joining._device_of(joining.launched_by(), "cuda")


def _nothing(place: RankInfo) -> None:
    return None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ranks": 2, "args": "dp=2"}, r"args='dp=2' is a str, .*Use .*args=\('dp=2',\)"),
        ({"ranks": 0}, "ranks=0: a run needs at least 1"),
        ({"ranks": 1, "device": "tpu"}, "device must be cpu, cuda or auto, got 'tpu'"),
        pytest.param(
            {"ranks": 1, "device": "cuda"},
            "torch sees no GPU here. Use device=cpu",
            marks=pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU"),
        ),
    ],
)
def test_mistakes_say_what_would_work(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        run_workers(_nothing, **arguments)


def _speak_in_lines(place: RankInfo) -> None:
    print(f"half of {place.rank}", end=" ", flush=True)
    print("a line")
    print("problem", file=sys.stderr)
    dist.barrier()
    if place.rank:
        print("unfinished", end="")


def test_launch_shows_what_every_rank_prints_and_names_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    workers.launch(_speak_in_lines, ranks=2, device="cpu")
    out, err = capfd.readouterr()
    assert {*out.splitlines()} >= {"half of 0 a line", "rank 1: half of 1 a line", "rank 1: unfinished"}
    assert {*err.splitlines()} >= {"problem", "rank 1: problem"}


_PIECES = 2000


def _speak_in_pieces(place: RankInfo) -> None:
    for number in range(_PIECES):
        print(number, "von", chr(0x4E00 + number), end=" ")
        if number % 100 == 0:
            print("half", number, file=sys.stderr)
    dist.barrier()
    if place.rank == 0:
        raise ValueError("of rank 0")


def test_streams_that_are_no_files_get_every_piece_in_its_order() -> None:
    """As a notebook's cell, whose stream sends each piece of a forked process through a socket of its own; of a rank that fails, too."""
    ends = pytest.raises(WorkerError, match="of rank 0")
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err, ends:
        run_workers(_speak_in_pieces, ranks=2, timeout_s=60)
    assert out.getvalue() == "".join(f"{number} von {chr(0x4E00 + number)} " for number in range(_PIECES))
    assert err.getvalue() == "".join(f"half {number}\n" for number in range(0, _PIECES, 100))


# ---------------------------------------------------------------- stop signals


def _until_stopped(place: RankInfo) -> str:
    stop = torch.zeros(1)
    while not stop.item():
        time.sleep(0.01)
        stop[0] = float(joining.requests()[StepFlag.STOP])
        dist.all_reduce(stop, op=dist.ReduceOp.MIN)  # all of them must have heard it
    return "stopped"


def _once_it_is_handled(number: signal.Signals, send: Callable[[], None]) -> None:
    """Call `send` in a thread as soon as `run_workers` handles a signal, which would end the session of tests before."""
    before = signal.getsignal(number)

    def wait_and_send() -> None:
        while signal.getsignal(number) == before:
            time.sleep(0.001)
        send()

    threading.Thread(target=wait_and_send).start()


@pytest.mark.usefixtures("stop_signals")
def test_a_stop_signal_asks_every_worker_to_stop() -> None:
    number = signal.SIGTERM
    # At once, so that it comes before the workers listen: it must reach them all the same.
    _once_it_is_handled(number, lambda: os.kill(os.getpid(), number))
    assert run_workers(_until_stopped, ranks=2, timeout_s=60) == "stopped"
    assert not joining.requests()[StepFlag.STOP]


def _never_stops(place: RankInfo, heard: Path) -> None:
    while not joining.requests()[StepFlag.STOP]:
        time.sleep(0.01)
    heard.touch()
    time.sleep(600)


@pytest.mark.usefixtures("stop_signals")
@pytest.mark.parametrize(("number", "end"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_second_signal_kills(number: signal.Signals, end: type[BaseException], tmp_path: Path) -> None:
    heard = tmp_path / "heard"

    def ask_twice() -> None:
        os.kill(os.getpid(), number)
        while not heard.exists():  # two signals that come together are one
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    _once_it_is_handled(number, ask_twice)
    with pytest.raises(end):
        run_workers(_never_stops, (heard,), ranks=2, timeout_s=60)


# ---------------------------------------------------------------- joining


def test_alone_is_a_run_of_one_rank_without_network() -> None:
    assert not joining.launched_by().is_engine
    handler = signal.getsignal(signal.SIGINT)
    place = join("cpu", timeout_s=60)
    try:
        assert place == RankInfo(0, 0, 1, 1, torch.device("cpu"))
        assert join("cpu") is place
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [1.0, 1.0]
        assert _own_listening_sockets(place).count("elsewhere") == 0
        assert signal.getsignal(signal.SIGINT) is handler  # Ctrl-C stays the user's
    finally:
        leave()
    assert not dist.is_initialized()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_group_that_exists_is_used_and_left_alone() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert join("cpu").world_size == 1
        leave()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
        del os.environ["GLOO_SOCKET_IFNAME"]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _join_by_environment(rank: int, world: int, variables: list[dict[str, str]]) -> tuple[Any, ...]:
    """Join as a launcher's process would, in a rank that the pool had joined already."""
    dist.destroy_process_group()
    os.environ.update(variables[rank])
    outside = joining.launched_by().is_engine
    place = join("cpu", timeout_s=30)
    total = torch.ones(1)
    dist.all_reduce(total)
    listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    os.kill(os.getpid(), signal.SIGUSR1)
    dist.barrier()
    heard = joining.requests()[StepFlag.SAVE]
    leave()
    return outside, place.rank, place.ranks_per_node, total.item(), heard, {address.ip for address in listening}


def test_join_a_launchers_run() -> None:
    """By torchrun's variables; those of the others: `test_launchers.py`."""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    processes = Pool(2)
    try:
        answers = processes.run(_join_by_environment, [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"])
    finally:
        processes.close()
    assert answers == [(True, rank, 2, 2.0, True, {"127.0.0.1"}) for rank in (0, 1)]


def test_default_ranks_and_the_warning_of_too_many() -> None:
    assert workers.default_ranks("cpu") == 2
    assert workers.oversubscription_warning(1) is None
    assert "10000 ranks of 3 threads share" in (workers.oversubscription_warning(10000, 3) or "")


def _gather(rank: int, world: int, factor: int) -> list[int]:
    everybodys = [torch.empty(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(everybodys, torch.tensor([rank * factor]))
    return [int(one.item()) for one in everybodys]


# ---------------------------------------------------------------- the tests' own time limit


def _strike_once(folder: Path, name: str) -> None:
    """End the time of this test as soon as both ranks work."""

    def wait_and_strike() -> None:
        while len(list(folder.glob(f"{name}-*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGALRM)

    threading.Thread(target=wait_and_strike).start()


def _sleep_in_the_pool(rank: int, world: int, folder: Path) -> None:
    (folder / f"pool-{rank}").touch()
    time.sleep(600)


def test_a_test_out_of_time_shows_the_stacks_of_pool_ranks(pool2: Pool, tmp_path: Path) -> None:
    _strike_once(tmp_path, "pool")
    with pytest.raises(OutOfTime, match=r"took longer than 600 s\n(?s:.)*in (_collect|run)\n") as caught:
        pool2.run(_sleep_in_the_pool, tmp_path)
    assert str(caught.value).count("in _sleep_in_the_pool") == 2
    assert pool2.run(_gather, 1) == [[0, 1]] * 2


def _sleep_in_a_worker(place: RankInfo, folder: Path) -> None:
    (folder / f"worker-{place.rank}").touch()
    time.sleep(600)


def test_a_test_out_of_time_shows_the_stacks_of_launched_workers(tmp_path: Path) -> None:
    before = psutil.Process().children()
    with subprocess.Popen(["sleep", "600"]) as program:
        _strike_once(tmp_path, "worker")
        with pytest.raises(OutOfTime) as caught:
            run_workers(_sleep_in_a_worker, (tmp_path,), ranks=2, timeout_s=60)
        program.kill()
    assert str(caught.value).count("in _sleep_in_a_worker") == 2
    assert "sleep 600\n  a program of its own" in str(caught.value)
    assert psutil.Process().children() == before


def _stops_to_look(place: RankInfo, in_rank: int) -> None:
    if place.rank == in_rank:
        pdb.Pdb().set_trace()
    place.rank + 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_debugger_without_a_terminal_says_how_to_debug(rank: int) -> None:
    with pytest.raises(WorkerError, match=r"breakpoint\(\) needs a terminal.* without launch in layout dp=1") as caught:
        run_workers(_stops_to_look, (rank,), ranks=2)
    assert "File" not in str(caught.value), "no frame of the debugger or of ours"


_STOPS = """
import samestep
def main(place):
    answer = 41
    if place.rank == 0:
        breakpoint()
    print("answer", answer, input("more? ") if place.rank == 0 else "")
if __name__ == "__main__":
    samestep.launch(main, ranks=2, device="cpu")
    print("end", input("last? "))
    from samestep.runtime.processes.workers import run_workers
    from tests.unit.test_launch import _faults_of_a_step
    print("faults", run_workers(_faults_of_a_step, ranks=1, timeout_s=60))
"""


def test_rank_0_has_the_terminal_for_a_debugger_and_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a step frees is there for the next one, in a process whose heap can grow in one piece, since it has run no other tests."""
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    )
    script = tmp_path / "stops.py"
    script.write_text(_STOPS)
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, str(script)])
    shown, questions = (
        b"",
        [(b"(Pdb) ", b"answer += 1\n"), (b"(Pdb) ", b"c\n"), (b"more? ", b"yes\n"), (b"last? ", b"bye\n")],
    )
    for question, answer in questions:
        while not shown.endswith(question):
            shown += os.read(terminal, 4096)
        os.write(terminal, answer)
    with contextlib.suppress(OSError):  # the other end of the terminal is closed
        while new := os.read(terminal, 4096):
            shown += new
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0
    lines = shown.decode().splitlines()
    assert {*lines} >= {"answer 42 yes", "rank 1: answer 41 ", "end bye"}
    (faults,) = (float(line.split()[1]) for line in lines if line.startswith("faults"))
    pages = _BLOCKS * _BLOCK_BYTES / resource.getpagesize()
    has_rules = hasattr(ctypes.CDLL(None), "gnu_get_libc_version")  # other C libraries have others
    assert faults < pages / 20 or not has_rules, f"{faults} faults of {pages} pages"
