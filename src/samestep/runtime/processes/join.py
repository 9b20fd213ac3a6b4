"""Joining a run: this process becomes a rank, started by `runtime/processes/workers.py` or by another launcher.

`join` meets the other ranks, makes the process group and returns this rank's `RankInfo`. A request to stop sets a flag,
on which all ranks must agree before they act. `runtime/processes/launchers.py` finds out who launched the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from samestep.building.torch_seams import abandon_groups, default_store
from samestep.errors import JobError, WorkerError
from samestep.job_tables import NO_MPS
from samestep.output.temporary_folder import compiler_cache
from samestep.program.ops import StepFlag
from samestep.runtime.processes import rank_order
from samestep.runtime.processes.launch_info import LOOPBACK, UNKNOWN, LaunchInfo, check_interfaces, interface_towards
from samestep.runtime.processes.launchers import discover
from samestep.runtime.processes.mesh import forget_groups
from samestep.runtime.processes.this_host import agreed_name, bind_near, keep_freed_memory

_HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)
"""The signal of a terminal that is closed; None where the system has none, as Windows."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *((_HANGUP,) if _HANGUP else ()))
SAVE_SIGNAL: signal.Signals | None = getattr(signal, "SIGUSR1", None)
"""The signal that asks for a checkpoint; None where the system has no such signal, as Windows."""
RECORD_SIGNAL: signal.Signals | None = getattr(signal, "SIGUSR2", None)
"""The signal that asks for a record of the next steps, for `samestep explain`."""
REQUESTS = tuple(number for number in (SAVE_SIGNAL, RECORD_SIGNAL) if number is not None)
"""The signals that ask for something while the run goes on; one rank that gets one is enough."""

CUDA_HAS_STARTED = (
    "CUDA has started in this notebook, and main is a function of one of its cells, so workers cannot be forked. Use launch"
    " in a restarted kernel, before anything calls torch.cuda (is_available() counts too), or main in a module of its own"
)


@dataclass(frozen=True)
class RankInfo:
    """This process among all ranks of the run: its rank, its machine and its device."""

    rank: int
    local_rank: int
    world_size: int
    ranks_per_node: int
    device: torch.device
    hosts: tuple[int, ...] = ()
    """The host of each rank, in a process group that existed and in which those of one host are no neighbours; empty otherwise."""


@dataclass(frozen=True)
class _Joined:
    place: RankInfo
    info: LaunchInfo
    made_group: bool
    old_handlers: Mapping[int, Any]
    borrowed_variables: tuple[str, ...]


_launch_info: LaunchInfo | None = None  # set in a worker of ours
_default_layout: str | None = None  # the layout of `samestep launch`, as text; None outside of it
_joined: _Joined | None = None
_stop_signal = 0  # the stop signal that came, 0 before one has
_requests: dict[int | None, bool] = {}  # the signals of REQUESTS that came and that no step has told the other ranks of
_ended_by = 0  # the signal after which the ranks agreed to stop, 0 before


def launched_by() -> LaunchInfo:
    """Return the position that samestep or another launcher gives to this process.

    Raises:
        JobError: the launcher's variables are incomplete, or contradict each other.
    """
    return _launch_info or discover()


def join(
    device: str = "auto",
    *,
    timeout_s: float = 600.0,
    ranks_per_node: int | None = None,
    threads: int | None = None,
    may_renew: bool = False,
) -> RankInfo:
    """Make this process a rank of its run, and return its rank, machine and device.

    The process group is gloo on CPUs and nccl on GPUs (without gloo: the few scalars of a step are on the device), and its
    ranks are numbered so that those of one host are neighbours (`rank_order.py`). An existing group is used as it is. A
    process that nobody launched is a run of one rank.

    Collective over the world: every process of the run calls it once; if one does not, the others wait for `timeout_s`.

    Args:
        device: cpu, cuda or auto (GPUs where there are any).
        timeout_s: seconds to wait for the other ranks, and later for any collective.
        ranks_per_node: overrides the launcher's number.
        threads: CPU threads of this process; without it they stay as they are.
        may_renew: whether an existing group whose ranks of one host are no neighbours may be replaced, if it is the only one.

    Raises:
        JobError: the launcher's variables are incomplete, or there is no such device.
        WorkerError: the other ranks were not met in time.
    """
    global _joined, _ended_by
    if _joined is not None and dist.is_initialized():
        return _joined.place
    _ended_by = 0
    info = launched_by()
    if threads is not None:
        torch.set_num_threads(threads)
    made_group = not dist.is_initialized()
    kind = resolve_device(device)
    # Before a device is chosen, which is the first use of a GPU.
    borrowed = set_defaults(allocator_variables(kind) | compiler_cache()) if made_group else ()
    try:
        info, store, hosts = _meet(info, timeout_s) if made_group else _meet_in_group(info, kind, may_renew)
        per_node = check_ranks_per_node(ranks_per_node or info.ranks_per_node, info.world_size)
        where = _device_of(info, kind)
        if info.world_size > 1:
            bind_near(where)
        if kind == "cpu" and info.launcher != "alone":  # a process of the user keeps its heap
            keep_freed_memory()
        if store is not None:
            # A run of one rank opens no port to the network: gloo listens even then, on the interface of this variable.
            borrowed += set_defaults(_interfaces_of(info))
            check_interfaces("NCCL_SOCKET_IFNAME" if kind == "cuda" else "GLOO_SOCKET_IFNAME")
            per_node = _init_process_group(info, store, where, timeout_s, per_node)
    except BaseException:
        _return(borrowed)
        raise
    # A process of the user keeps its signal handlers: its code may never call requests().
    handlers = _listen_for_stop() if info.is_engine else {}
    local_rank = info.local_rank if per_node == info.ranks_per_node else info.rank % per_node
    place = RankInfo(info.rank, local_rank, info.world_size, per_node, where, hosts)
    _joined = _Joined(place, info, store is not None, handlers, borrowed)
    return place


@contextlib.contextmanager
def default_layout(layout: str) -> Iterator[None]:
    """Inside, `parallelize` uses this layout if it is given none."""
    global _default_layout
    previous, _default_layout = _default_layout, layout
    try:
        yield
    finally:
        _default_layout = previous


def launched_layout() -> str | None:
    """Return the layout for which `samestep launch` has started this rank, as text; empty if it has none, None in other processes."""
    return _default_layout


def store_address() -> tuple[str, int] | None:
    """Return the host and port of the store where the ranks of this run met; None where it has no address."""
    info = _joined.info if _joined else None
    return (info.host, info.port) if info and info.host and info.world_size > 1 else None


def become_worker(info: LaunchInfo) -> None:
    """Prepare this new worker to join as `info`: forget the run and the groups that its parent had joined, and listen
    for stop signals."""
    global _launch_info, _joined, _stop_signal, _ended_by
    _launch_info, _joined, _stop_signal, _ended_by = info, None, 0, 0
    _requests.clear()
    abandon_groups()
    forget_groups()
    _listen_for_stop()


def leave() -> None:
    """Undo `join`; a process group that existed before stays.

    Ranks that still communicate with this one then fail.
    """
    global _joined
    if _joined is None:
        return
    joined, _joined = _joined, None
    if joined.made_group and dist.is_initialized():
        dist.destroy_process_group()
        forget_groups()
    _return(joined.borrowed_variables)
    restore_signals(joined.old_handlers)


def requests() -> dict[StepFlag, bool]:
    """Return what signals have asked of this rank: to stop (SIGTERM, SIGINT, SIGHUP); since the last call also to save a checkpoint
    (SIGUSR1), and to record where the time of steps goes (SIGUSR2).

    Ranks learn of it at different times, so they must agree (one all_reduce a step) before they act on it.
    """
    return {
        StepFlag.STOP: _stop_signal != 0,
        StepFlag.SAVE: _requests.pop(SAVE_SIGNAL, False),
        StepFlag.RECORD: _requests.pop(RECORD_SIGNAL, False),
    }


def note_stop() -> None:
    """Note that the ranks have agreed to stop after a signal; a rank that has got none itself takes it for SIGTERM."""
    global _ended_by
    _ended_by = _stop_signal or signal.SIGTERM


def ended_by() -> int:
    """Return the number of the signal after which the ranks agreed to stop, with whose status this rank ends; 0 without one.

    Under torchrun it is 0: its agent would start a rank that ends otherwise again, at once.
    """
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else int(_ended_by)


def _on_request(signal_number: int, _frame: FrameType | None) -> None:
    _requests[signal_number] = True


def _on_stop(signal_number: int, _frame: FrameType | None) -> None:
    global _stop_signal
    _stop_signal = signal_number
    if signal_number == signal.SIGINT:  # a second Ctrl-C interrupts at once
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _listen_for_stop() -> dict[int, Any]:
    """Install handlers of the signals to stop, to save and to record, which set a flag; return the handlers they replace."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    is_kept = _HANGUP is not None and signal.getsignal(_HANGUP) is signal.SIG_IGN  # by nohup
    numbers = [number for number in STOP_SIGNALS if not (number == _HANGUP and is_kept)]
    handlers: dict[int, Any] = {number: signal.signal(number, _on_stop) for number in numbers}
    return handlers | {number: signal.signal(number, _on_request) for number in REQUESTS}


def restore_signals(handlers: Mapping[int, Any]) -> None:
    """Restore earlier signal handlers."""
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def allocator_variables(device_type: str) -> dict[str, str]:
    """Return the variable that lets torch's allocator grow its segments in place, so that less memory is unused.

    Torch reads it when a process first uses a GPU. It is left alone where the user has set it, under either name.
    """
    is_given = "PYTORCH_CUDA_ALLOC_CONF" in os.environ  # the old name, which torch reads where the new one is not set
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if device_type == "cuda" and not is_given else {}


def _interfaces_of(info: LaunchInfo) -> dict[str, str]:
    """Return the variables of interfaces for a process that samestep's launcher did not start.

    gloo would take the interface of this host's name, which is often its own loopback address; nccl finds its own.
    """
    if info.launcher == "samestep":
        return {}
    if info.world_size == 1:
        return interface_variables()
    towards = interface_towards(info.host) if info.host else ""
    return {"GLOO_SOCKET_IFNAME": towards} if towards else {}


def interface_variables(interface: str = LOOPBACK) -> dict[str, str]:
    """Return the variables that keep gloo and nccl on one interface; the loopback one is off the network."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def set_defaults(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Set those variables that the user has not set; return their names."""
    new = tuple(name for name in variables if name not in os.environ)
    os.environ.update({name: variables[name] for name in new})
    return new


def _return(variables: tuple[str, ...]) -> None:
    """Remove variables that `set_defaults` has set."""
    for name in variables:
        os.environ.pop(name, None)


def _meet(info: LaunchInfo, timeout_s: float) -> tuple[LaunchInfo, Store | None, tuple[int, ...]]:
    """Meet the other ranks in their store, and return this process's position in our order of ranks, with the store; no hosts.

    Collective over the world: every rank calls it; if one does not, the others wait for `timeout_s`.

    Raises:
        JobError: a rank was given to two processes.
        WorkerError: the other ranks were not met in time.
    """
    began, store = time.monotonic(), None
    try:
        store = _store_of(info, datetime.timedelta(seconds=timeout_s))
        store.set_timeout(datetime.timedelta(seconds=timeout_s))
        if info.launcher == "samestep" or info.world_size == 1:
            return info, store, ()  # samestep's own launcher counts by hosts
        rank, local_rank, per_node, text = rank_order.agree(store, info, timeout_s)
    except RuntimeError as error:
        if info.launcher == "samestep":
            raise  # the parent reports which worker is missing
        reason = rank_order.never_came(store, info.world_size) or str(error).splitlines()[0]
        if store is None and os.environ.get("MASTER_ADDR") == info.host and not interface_towards(info.host):
            reason = f"MASTER_ADDR={info.host} names no host that can be reached from here. Use the name or address of rank 0's host"
        raise WorkerError(
            "ranks-not-met",
            f"rank {info.rank} of {info.world_size} ({info.launcher}) did not meet the other ranks at "
            f"{info.host}:{info.port} within {time.monotonic() - began:.0f} s: {reason}",
        ) from None
    if text:
        print(f"samestep: {text}", file=sys.stderr, flush=True)
    return dataclasses.replace(info, rank=rank, local_rank=local_rank, ranks_per_node=per_node), store, ()


def _meet_in_group(
    info: LaunchInfo, device_type: str, may_renew: bool
) -> tuple[LaunchInfo, Store | None, tuple[int, ...]]:
    """Return this process's position in a group that its user or Ray has created, and the hosts of its ranks if they are mixed.

    With `may_renew`, a group of mixed hosts that is the only one of each process is ended; the store, in which a new one can
    be made, is returned with the position in that one.

    Collective over the world, see [Note: collective calls].
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if (info.rank, info.world_size) != (rank, world):
        info = LaunchInfo("the user", rank, UNKNOWN, world, world)
    if world == 1:
        return dataclasses.replace(info, local_rank=0), None, ()
    device = torch.device(device_type, max(0, info.local_rank)) if device_type == "cuda" else torch.device("cpu")
    numbering, is_shared = rank_order.of_existing_group(info, device)
    is_mixed = [*numbering.hosts] != sorted(numbering.hosts)
    if is_mixed and may_renew and not is_shared:
        store = PrefixStore("samestep/renewed", default_store())
        dist.destroy_process_group()
        forget_groups()
        new = (numbering.ranks[rank], numbering.local_ranks[rank], world, numbering.ranks_per_node)
        return LaunchInfo(info.launcher, *new, host=info.host, port=info.port), store, ()
    local_rank = numbering.local_ranks[rank] if info.local_rank == UNKNOWN else info.local_rank
    per_node = 1 if is_mixed else numbering.ranks_per_node
    info = dataclasses.replace(info, local_rank=local_rank, ranks_per_node=per_node)
    return info, None, numbering.hosts if is_mixed else ()


def resolve_device(device: str) -> str:
    """Return cpu or cuda, without starting CUDA in this process: GPUs are only counted.

    Raises:
        JobError: there is no such device.
    """
    if device == "mps":
        raise JobError("mps-unsupported", f"device={device!r}: {NO_MPS}")
    if device not in ("auto", "cpu", "cuda"):
        raise JobError("device-missing", f"device must be cpu, cuda or auto, got {device!r}")
    if device == "cpu":
        return "cpu"
    gpus = torch.cuda.device_count()
    if device == "cuda" and not gpus:
        raise JobError("device-missing", "device=cuda, but torch sees no GPU here. Use device=cpu")
    return "cuda" if gpus else "cpu"


def _device_of(info: LaunchInfo, device_type: str) -> torch.device:
    """Choose this rank's device and make it the current one.

    Raises:
        JobError: there are fewer GPUs than ranks on this machine.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    index = 0 if gpus == 1 else info.local_rank  # a launcher may show each task only one GPU
    if index >= gpus:
        raise JobError(
            "device-missing", f"local rank {index} has no GPU: {gpus} on this machine. Use at most {gpus} ranks on it"
        )
    device = torch.device("cuda", index)
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:  # torch does not say so before the fork where CUDA was only asked for its devices
        if "forked subprocess" not in str(error):
            raise
        raise JobError("cuda-started", CUDA_HAS_STARTED) from None
    return device


def _init_process_group(
    info: LaunchInfo, store: Store, device: torch.device, timeout_s: float, ranks_per_node: int
) -> int:
    """Make the process group; return the ranks per node, or 1 where machines have different numbers of ranks.

    Collective over the world: every rank calls it; if one does not, the others wait for `timeout_s`.

    Raises:
        WorkerError: the other ranks did not answer in time.
    """
    cuda = device.type == "cuda"
    try:
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=info.rank,
            world_size=info.world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=device if cuda else None,
        )
        # Until all have met, none may leave: gloo would report a closed connection to those that still connect.
        agreed = torch.tensor([ranks_per_node, -ranks_per_node], device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    except RuntimeError as error:
        if info.launcher == "samestep":
            raise  # the parent reports which worker is missing
        raise WorkerError(
            "ranks-not-met",
            f"rank {info.rank} of {info.world_size} ({info.launcher}) met the other ranks at {info.host}:{info.port}, and cannot "
            f"connect to them: {str(error).splitlines()[0]}",
        ) from None
    least, most = agreed[0].item(), -agreed[1].item()
    return ranks_per_node if least == most else 1  # machines with unequal numbers of ranks


def _store_of(info: LaunchInfo, timeout: datetime.timedelta) -> Store:
    """Open the store that the ranks of `info` share."""
    if info.path:
        return FileStore(info.path, info.world_size)
    if info.world_size == 1:
        return HashStore()
    if info.store_is_kept:
        store = TCPStore(info.host, info.port, info.world_size, is_master=False, timeout=timeout)
        name = agreed_name(PrefixStore("samestep", store), info.rank, info.world_size, timeout.total_seconds())
        return PrefixStore(f"samestep/{name}", store)
    listening = listen_on(info.host, info.port) if info.rank == 0 else None
    return TCPStore(
        info.host,
        info.port,
        info.world_size,
        is_master=info.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def listen_on(host: str, port: int) -> int | None:
    """Listen on the one address of `host`; torch's store would listen on every interface.

    Raises:
        WorkerError: the port is taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((address[0], port), family=family).detach()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise WorkerError("port-taken", f"port {port} of {host} is taken. Use another MASTER_PORT") from None
        return None  # a name that resolves here to another machine's address (a Kubernetes service)


def check_ranks_per_node(ranks_per_node: int, world_size: int) -> int:
    """Return the ranks of a node, if it divides the number of ranks.

    Raises:
        JobError: it does not.
    """
    if world_size % ranks_per_node:
        works = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise JobError(
            "ranks-indivisible", f"ranks_per_node={ranks_per_node} does not divide the {world_size} ranks. Use {works}"
        )
    return ranks_per_node
