"""The command of torchrun, to be run on every host."""

from __future__ import annotations

from samestep.engines.wanted import LaunchRequest, shell
from samestep.errors import InputError


def script(wanted: LaunchRequest) -> str:
    """Return a script for each host.

    Raises:
        InputError: the agents of several hosts have no address at which they meet.
    """
    torchrun = wanted.site.torchrun
    words = ["torchrun", f"--nnodes={wanted.nodes}", f"--nproc-per-node={wanted.ranks_per_node}"]
    words += [f"--max-restarts={torchrun.restarts}", *torchrun.options]
    if wanted.nodes == 1:
        words += ["--standalone"]
    else:
        endpoint = torchrun.endpoint or (f"{wanted.hosts[0]}:29400" if wanted.hosts else "")
        if not endpoint:
            raise InputError(
                '--on torchrun with several nodes needs an address: --nodes H1,H2, or endpoint = "HOST:PORT" in [torchrun] of --site'
            )
        words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={wanted.name}"]
    notes = ("Run it on every node; torchrun starts the ranks again where one fails, and they resume.",)
    lines = ["#!/bin/bash", *wanted.head("torchrun", *notes), *wanted.setup()]
    return "\n".join([*lines, f"exec {shell(words)} \\", f"    --no-python {shell(wanted.train_words())}"]) + "\n"
