"""Which launchers start samestep here: each trains the default job, made small, to the losses of one rank; what is absent is said.

    make launchers [LAUNCHER=Ray]

Installs Open MPI and MPICH (`make mpi`) and Ray (`make ray`), which need no root; Slurm needs Debian's packages, and root. Writes `rows/launchers.json`, from which `python docs/tables.py` makes the table of docs/launching.md. The tests are those of
`tests/launchers/` and others; a launcher is skipped where its programs are not installed, and the row says which.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = Path(__file__).parent / "rows" / "launchers.json"


@dataclass(frozen=True)
class Launcher:
    """The tests of one way to start ranks, and which of them, by words in their names, prove what."""

    tests: str
    """Paths of tests for pytest, and options of it."""
    losses: str = ""
    """Those that hold the losses against one rank's."""
    stop: str = ""
    """Those that ask a run to stop, and look for the checkpoint, the status, and how it goes on."""
    lost: str = ""
    """Those that lose a node, a host or a process while the run trains."""
    environment: str = ""
    """The virtual environment whose Python runs them, if it is here; empty for that of this program."""

    @property
    def python(self) -> str:
        """The Python that runs the tests."""
        own = ROOT / self.environment / "bin" / "python"
        return str(own) if self.environment and own.exists() else sys.executable


LAUNCHERS = {
    "Slurm, srun and torchrun": Launcher(
        "tests/launchers/test_slurm.py", "losses_of_one_rank uneven_numbers", "asked_to_stop", "node_that_is_lost"
    ),
    "Open MPI": Launcher("tests/launchers/test_mpi.py -k openmpi", "losses_of_one_rank", "asked_to_stop"),
    "MPICH": Launcher("tests/launchers/test_mpi.py -k mpich", "losses_of_one_rank", "asked_to_stop"),
    "Ray Train, two nodes": Launcher("tests/launchers/test_ray.py", "two_nodes_of_ray", "", "node_of_ray_that_is_lost", ".venv-ray"),
    "torchrun, and two of its agents in network namespaces": Launcher(
        "tests/launchers/test_torchrun.py tests/parity/test_training.py tests/crashes/test_hosts.py -k torchrun",
        "losses_of_our_own", "", "two_agents ranks_that_are_left",
    ),
    "our agent on hosts that are network namespaces": Launcher(
        "tests/crashes/test_hosts.py -k (not(torchrun))", "one_machine_to_the_bit", "asked_to_stop", "without_a_host without_the_leading"
    ),
    "variables of Kubernetes, srun, mpirun, in processes": Launcher(
        "tests/launchers/test_variables.py", "losses_of_one_rank", "asked_to_stop", "pod_that_fails"
    ),
    "scripts, and manifests against schemas": Launcher("tests/unit/test_engines.py"),
}  # fmt: skip
ASPECTS = {
    "losses": "losses of one rank",
    "stop": "after a signal: saves, ends with its status, resumes",
    "lost": "after losing a host or rank: continues, or names it",
}


def outcome(launcher: Launcher) -> dict[str, object]:
    """Run the tests of one launcher; return how many passed and failed, why others were skipped, and what is proven."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        words = [
            launcher.python,
            "-m",
            "pytest",
            "-q",
            "--every-layout",
            f"--junitxml={report}",
            *launcher.tests.split(),
        ]
        subprocess.run(words, cwd=ROOT, check=False)
        cases = [*ElementTree.parse(report).iter("testcase")]
    skipped = [one.get("message", "") for case in cases for one in case.iter("skipped")]
    ends = {case.get("name", ""): _end(case) for case in cases}
    counts = {end: [*ends.values()].count(end) for end in ("passed", "failed", "skipped")}
    found = {aspect: _found(ends, getattr(launcher, aspect).split()) for aspect in ASPECTS}
    return {**counts, "why": "; ".join(dict.fromkeys(skipped)), **found}


def _end(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def _found(ends: dict[str, str], words: list[str]) -> str:
    """Return `yes` where every test with one of the words in its name has passed, else how the first one ended."""
    asked = {name: end for name, end in ends.items() if any(word in name for word in words)}
    worst = [end for kind in ("failed", "skipped") for end in asked.values() if end == kind]
    return worst[0] if worst else "yes" if asked else ""


def table(rows: dict[str, dict[str, object]]) -> str:
    """Return the outcomes as a table in Markdown."""
    lines = [f"| launcher | {' | '.join(ASPECTS.values())} | tests passed | failed | skipped, and why |"]
    lines.append("| --- |" + " --- |" * (len(ASPECTS) + 3))
    for name, row in rows.items():
        why = f"{row['skipped']}: {row['why']}" if row["skipped"] else "0"
        proven = " | ".join(str(row[aspect]) for aspect in ASPECTS)
        lines.append(f"| {name} | {proven} | {row['passed']} | {row['failed']} | {why} |")
    return "\n".join(lines)


def stored() -> str:
    """Return the table of the last `make launchers`."""
    return table(json.loads(ROWS.read_text(encoding="utf-8")))


def main() -> int:
    """Run all launchers that are here, or those whose names have a word of the command line; return 1 where one fails."""
    wanted = {name: one for name, one in LAUNCHERS.items() if not sys.argv[1:] or any(w in name for w in sys.argv[1:])}
    before = json.loads(ROWS.read_text(encoding="utf-8")) if ROWS.exists() and len(wanted) < len(LAUNCHERS) else {}
    found: dict[str, dict[str, object]] = {}
    for name, launcher in wanted.items():
        found[name] = outcome(launcher)
        rows = {name: (before | found)[name] for name in LAUNCHERS if name in before | found}
        ROWS.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    return int(any(row["failed"] for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
