"""The line of mpirun, of Open MPI or of MPICH: MPI starts the ranks, and is not used for messages.

mpirun gives each rank its number and no address. The script therefore asks mpirun itself which host has rank 0.
"""

from __future__ import annotations

from samestep.engines.wanted import LaunchRequest, shell


def script(wanted: LaunchRequest) -> str:
    """Return the script."""
    mpi = wanted.site.mpi
    hosts = mpi.hosts or wanted.hosts
    each = str(wanted.ranks_per_node)
    if mpi.by == "openmpi":
        base = ["mpirun", *(["--host", ",".join(f"{host}:{each}" for host in hosts)] if hosts else []), *mpi.options]
        ranks = ["--map-by", f"ppr:{each}:node", "--bind-to", "none", "-x", "MASTER_ADDR", "-x", "MASTER_PORT"]
        ranks += [word for name in wanted.site.run.environment for word in ("-x", name)]
    else:
        base = ["mpiexec.hydra", *(["-hosts", ",".join(hosts)] if hosts else []), "-ppn", each, *mpi.options]
        ranks = ["-genvlist", ",".join(["PATH", "MASTER_ADDR", "MASTER_PORT", *wanted.site.run.environment])]
    lines = [
        "#!/bin/bash",
        *wanted.head("mpi", "A run that gets SIGTERM saves and ends with status 143; the same script resumes it."),
    ]
    lines += [*wanted.setup()]
    if wanted.nodes > 1:
        lines += [
            "# Rank 0 is on the first host of mpirun's list.",
            f"MASTER_ADDR=$({shell([*base, '-n', '1', 'hostname'])})",
        ]
    else:
        lines += ["MASTER_ADDR=127.0.0.1"]
    lines += [f"MASTER_PORT={mpi.port}", "export MASTER_ADDR MASTER_PORT", ""]
    lines += [
        "# Asked to end, mpirun asks the ranks, which save; Open MPI kills those that take longer than a second.",
        "stopped=0",
        "trap 'stopped=1; kill -TERM $!' TERM",
        f"{shell([*base, '-n', str(wanted.ranks), *ranks])} \\",
        f"    {shell(wanted.train_words())} &",
        "wait $!",
        "status=$?",
        "if [ $stopped -eq 1 ]; then",
        "    wait $!  # the trap has ended the first wait",
        "    exit 143",
        "fi",
        "exit $status",
    ]
    return "\n".join(lines) + "\n"
