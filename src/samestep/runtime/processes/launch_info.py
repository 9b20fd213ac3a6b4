"""The position that a launcher gives to a process, and the checks of its numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.errors import JobError

ALONE = "alone"
_LAST_PORT = 65535
UNKNOWN = -1
"""The local rank of a process to which its launcher gives none."""


@dataclass(frozen=True)
class LaunchInfo:
    """The position that a launcher gives to one process, before it joins."""

    launcher: str
    """Name of the launcher: samestep, torchrun, srun, Open MPI, ..., or alone."""
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    ranks_per_node: int = 1
    host: str = ""
    port: int = 0
    path: str = ""
    """File through which samestep's workers find each other; others use host:port."""
    store_is_kept: bool = False
    """Whether the store at host:port is that of another process, and may hold what earlier starts wrote; else rank 0 holds it."""
    node: str = ""
    """The launcher's name of this host; empty where it gives none."""
    num_hosts: int = 1
    """The hosts on each of which the launcher has started one process, which starts the ranks; 1 where it starts the ranks."""
    host_index: int = 0
    """The position of this host among them."""
    inside: str = ""
    """The allocation of a process that no launcher has started as one of several, in words; empty outside of any."""

    @property
    def is_engine(self) -> bool:
        """Whether another launcher than samestep's has started this process as a rank."""
        return self.launcher not in (ALONE, "samestep", "the user") and self.num_hosts == 1


def check_rank(name: str, rank: int, count_name: str, count: int) -> None:
    """Refuse a number that is none of a count.

    Raises:
        JobError: it is none.
    """
    if not 0 <= rank < count:
        raise JobError(
            "launcher-variables",
            f"{name}={rank} is not a rank of {count_name}={count}; ranks are 0 to {count_name} - 1",
        )


def check_local(local: tuple[str, int], here: tuple[str, int], world: tuple[str, int]) -> None:
    """Refuse a number of ranks of this host that the world does not have, and a local rank beyond it.

    Raises:
        JobError: there are too many.
    """
    if not 1 <= here[1] <= world[1]:
        raise JobError(
            "launcher-variables",
            f"{here[0]}={here[1]} contradicts {world[0]}={world[1]}: a host has 1 to {world[1]} of the ranks",
        )
    if local[1] != UNKNOWN and not 0 <= local[1] < here[1]:
        raise JobError(
            "launcher-variables",
            f"{local[0]}={local[1]} contradicts {here[0]}={here[1]}: local ranks are 0 to {here[1] - 1}",
        )


def number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a whole number from the environment.

    Raises:
        JobError: the variable is not an integer.
    """
    text = env.get(name, "")
    if text == "" and default is not None:
        return default
    if not re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text):
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise JobError("launcher-variables", f"{name}={shown} is not a whole number; the launcher sets it")
    return int(text)


def port(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the port number of a store from the environment.

    Raises:
        JobError: the variable is no port.
    """
    found = number(env, name, default)
    if not 1 <= found <= _LAST_PORT:
        raise JobError("launcher-variables", f"{name}={found} is no port: 1 to {_LAST_PORT} are, such as 29500")
    return found
