"""The share of one host in a run that another launcher has started once on each host.

A pod of Kubernetes runs the command once. It then starts an equal share of the ranks, as
torchrun would, and watches its own. All ranks meet in a store that the first host holds; a rank that dies ends those of the other
hosts with its connections.

```
host 0: samestep train ─ holds the store ─ run_workers ──► ranks 0, 1
host 1: samestep train ─────────────────── run_workers ──► ranks 2, 3
```
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from samestep.errors import JobError, WorkerError
from samestep.runtime.processes.join import listen_on
from samestep.runtime.processes.launch_info import LOOPBACK, LaunchInfo, interface_towards

_ASK_AGAIN_S = 1.0


@dataclass(frozen=True)
class HostShare:
    """The ranks of this host, and the address of the rendezvous."""

    info: LaunchInfo
    ranks: int
    """The ranks on all hosts."""
    timeout_s: float
    """Seconds in which the name of the first host must be known here: a cluster gives it once its pod runs."""

    @property
    def num_ranks(self) -> tuple[int, ...]:
        """The number of ranks of this host, alone in the tuple."""
        return (self.ranks_per_node,)

    @property
    def ranks_per_node(self) -> int:
        """The ranks of every host."""
        return self.ranks // self.info.num_hosts

    @property
    def first_rank(self) -> int:
        """The first rank of this host."""
        return self.info.host_index * self.ranks_per_node

    @property
    def interface(self) -> str:
        """The interface of this host over which it reaches the first one."""
        return interface_towards(self.info.host) or LOOPBACK

    @contextlib.contextmanager
    def store(self) -> Iterator[tuple[str, int]]:
        """Hold the store on the first host, and wait for its name on the others; yield its address.

        Raises:
            WorkerError: the port is taken, or the name stays unknown.
        """
        host, port, tcp = self.info.host, self.info.port, None
        if self.info.host_index == 0:
            tcp = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listen_on(host, port))
        else:
            self._wait_for_name()
        yield host, port
        del tcp

    def workers(self, _options: object) -> tuple[()]:
        """Return no workers: every host watches those that it has started."""
        return ()

    def _wait_for_name(self) -> None:
        end_s = time.monotonic() + self.timeout_s
        while True:
            try:
                socket.getaddrinfo(self.info.host, self.info.port)
                return
            except OSError as error:
                if time.monotonic() > end_s:
                    raise WorkerError(
                        "network-interface",
                        f"{self.info.host}, the first host by {self.info.launcher}, has no address here after {self.timeout_s:g} s: "
                        f"{error.strerror}",
                    ) from None
            time.sleep(_ASK_AGAIN_S)


def share_of(info: LaunchInfo, ranks: int, timeout_s: float) -> HostShare:
    """Return this host's share of `ranks`.

    Raises:
        JobError: the hosts cannot share them equally, or the launcher has fewer on each host.
    """
    each, rest = divmod(ranks, info.num_hosts)
    if rest or not each:
        near = max(1, each) * info.num_hosts
        raise JobError(
            "ranks-indivisible",
            f"{info.num_hosts} hosts by {info.launcher} cannot share {ranks} ranks equally. Use {near} ranks",
        )
    if 0 < info.ranks_per_node < each:
        most = info.ranks_per_node * info.num_hosts
        raise JobError(
            "ranks-indivisible",
            f"{ranks} ranks are {each} on each of {info.num_hosts} hosts by {info.launcher}, which has {info.ranks_per_node}. Use {most} ranks",
        )
    return HostShare(info, ranks, timeout_s)
