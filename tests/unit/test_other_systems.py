"""On a system without POSIX calls, as Windows is, and on macOS samestep imports, plans, simulates and trains in one process.

A child interpreter first imports the libraries, which have their own code for each system, and then loses the modules, the signals
and the functions that Windows lacks.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

HIDING = """
import importlib, os, pkgutil, signal, socket, sys
import filelock, psutil, torch, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.tensor, torch.utils.data

MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog"}
SIGNALS = "SIGUSR1 SIGUSR2 SIGKILL SIGALRM SIGHUP SIGCHLD SIGQUIT SIGPIPE SIGSTOP SIGCONT SIGTSTP SIGTTOU pthread_sigmask setitimer alarm"
CALLS = (
    "fork forkpty getuid geteuid getgid setsid getpgid getpgrp killpg wait wait3 wait4 waitid sched_getaffinity sched_setaffinity sysconf "
    "statvfs mkfifo uname getloadavg pread pwrite nice fchmod fchown chown posix_fallocate register_at_fork O_DIRECTORY O_CLOEXEC O_NOFOLLOW"
)

class Hiding:
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hiding())
for name in MODULES:
    sys.modules.pop(name, None)
for owner, names in ((signal, SIGNALS), (os, CALLS), (socket, "AF_UNIX")):
    for name in names.split():
        if hasattr(owner, name):
            delattr(owner, name)
"""


def said(code: str) -> str:
    """Return what a child interpreter without POSIX calls prints."""
    program = HIDING + textwrap.dedent(code)
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_everything_imports_plans_simulates_and_trains_in_one_process_without_posix_calls() -> None:
    code = """
        import samestep
        for found in pkgutil.walk_packages(samestep.__path__, "samestep."):
            # Kernels need Triton.
            if not found.name.endswith("__main__") and not found.name.endswith(("_bits", "_dropout")):
                importlib.import_module(found.name)
        job = samestep.Job(model={"source": "preset:gpt3-125m"})
        print("planned", len(samestep.plan(job, 8, "h100x8").best) > 0)
        print("simulated", samestep.simulate(job, "dp=8 zero=1", "h100x8").tokens > 0)
        job = samestep.Job(train={"global_batch": 4, "steps": 2}, run={"device": "cpu"})
        data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
        run = samestep.parallelize(lambda: torch.nn.Linear(3, 1), "mse", lambda params: torch.optim.SGD(params, lr=0.1), job=job)
        print("trained", [run.step(batch).step for batch in samestep.batches(data, job)])
        """
    assert said(code).split() == ["planned", "True", "simulated", "True", "trained", "[1,", "2]"]
