"""The command that starts samestep's agent on hosts over ssh."""

from __future__ import annotations

import shlex

from samestep.engines.wanted import LaunchRequest, shell
from samestep.errors import InputError
from samestep.runtime.processes.rank_variables import ON_HOSTS


def script(wanted: LaunchRequest) -> str:
    """Return the script, to be run where ssh reaches the hosts.

    Raises:
        InputError: no hosts are named.
    """
    hosts = wanted.hosts or wanted.site.ssh.hosts
    if len(hosts) < 2:
        raise InputError(
            "--on ssh needs the names of two hosts or more: --nodes H1,H2, or hosts in [ssh] of --site, works"
        )
    if len(hosts) != wanted.nodes:
        raise InputError(
            f"--nodes {wanted.nodes}: [ssh] of --site names {len(hosts)} hosts; --nodes {len(hosts)} works"
        )
    notes = ("The folder it is run in, and its Python, must be there on every host.",)
    words = [*wanted.train_words(), "--nodes", ",".join(hosts)]
    lines = wanted.setup()
    on_hosts = [f"export {ON_HOSTS}={shlex.quote(chr(10).join(lines))}"] if lines else []  # ssh passes no variables on
    return "\n".join(["#!/bin/bash", *wanted.head("ssh", *notes), *lines, *on_hosts, f"exec {shell(words)}"]) + "\n"
