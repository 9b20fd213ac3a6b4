"""What a run enters: functions of samestep by part of a run, the main path, and the core; `python benchmarks/structure.py --entered`.

functions entered   by rank 0 of a Llama in `dp=2` that prepares and takes steps 1 and 2, as a user's loop has it: a module
                    instance, an optimizer instance, a DataLoader, and the default `watch_every`
the main path       the files of which step 2 enters more than three functions, with `job`, `layout` and `program/program`
the core            the modules that are imported, by this process or a worker, once `train` and `verify` have run `LAYOUTS`
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ALWAYS = ("job.py", "layout.py", "program/program.py")
"""Files that a reader of the main path begins with."""
MANY = 3
"""A file of which a step enters more functions than these is on the main path."""
LAYOUTS = (
    "dp=1", "dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "dp=2 microbatch=2 recompute=full", "tp=2", "tp=2 sequence_parallel",
    "cp=2", "pp=2 microbatch=4", "pp=2 microbatch=2 schedule=zero-bubble", "dp=2 ep=2",
)  # fmt: skip
"""Twelve layouts that train and verify the core; the last one with experts."""
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

Functions = dict[str, int]
"""Functions by `file:line name`, with their lines of code."""


def counts() -> dict[str, int]:
    """Return the published counts of what a run enters and imports."""
    by_part = functions()
    numbers = {f"functions entered: {part}": len(found) for part, found in by_part.items()}
    numbers["functions entered: all"] = len({name for found in by_part.values() for name in found})
    main_path, core, everything = files_of_main_path(by_part["step 2"]), files_of_core(), _files()
    numbers["files of the main path"], numbers["lines of the main path"] = len(main_path), _lines(main_path)
    numbers["files of the core"], numbers["lines of the core"] = len(core), _lines(core)
    numbers["files beyond the core"], numbers["lines beyond the core"] = (
        len(everything - core),
        _lines(everything - core),
    )
    return numbers


def functions() -> dict[str, Functions]:
    """Return the functions of samestep that rank 0 enters, by part of its run."""
    import samestep

    by_part: dict[str, Functions] = samestep.launch(_entered_by_a_rank, ranks=2, device="cpu")
    return by_part


def files_of_main_path(step: Functions) -> set[str]:
    """Return the files of the main path, of the functions that a second step enters."""
    of_file = Counter(name.partition(":")[0] for name in step)
    return {file for file, number in of_file.items() if number > MANY} | set(ALWAYS)


def _entered_by_a_rank(_: object) -> dict[str, Functions]:
    import torch
    from torch.utils.data import DataLoader

    import samestep
    from samestep.building.families import family_source

    torch.set_num_threads(1)
    job = samestep.Job(train={"global_batch": 4, "steps": 3}, run={"device": "cpu"})
    tokens = torch.randint(0, 64, (32, 9), generator=torch.Generator().manual_seed(1))
    loader = DataLoader([{"input_ids": row[:-1], "labels": row[1:]} for row in tokens], batch_size=4)
    model = family_source("llama", _SIZES, "causal")()
    optimizer = torch.optim.AdamW(model.parameters())
    with _profiled() as preparation:
        run = samestep.parallelize(model, "cross_entropy", optimizer, layout="dp=2", job=job)
        batches = samestep.batches(loader, job)
        first = next(batches)
        run.prepare(first.samples([0]))
    with _profiled() as step_1:
        run.step(first)
    with _profiled() as step_2:
        run.step(next(batches))
    return {"preparation": preparation, "step 1": step_1, "step 2": step_2}


@contextmanager
def _profiled() -> Iterator[Functions]:
    """Note each function of samestep that is entered, with its lines of code."""
    entered: Functions = {}
    root = f"{_root()}/"

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and "<" not in code.co_name:
            lines = {line for *_, line in code.co_lines() if line}
            entered[f"{code.co_filename.removeprefix(root)}:{code.co_firstlineno} {code.co_name}"] = len(lines)

    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(None)


def files_of_core() -> set[str]:
    """Return the files of the modules that a process of its own and its workers import for `train` and `verify`."""
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder) / "names"
        subprocess.run(
            [sys.executable, "-W", "ignore", __file__, str(names)], check=True, cwd=folder, stdout=subprocess.DEVNULL
        )
        imported = {name.replace(".", "/") for name in names.read_text().split()}
    return {file for file in _files() if file.removesuffix(".py").removesuffix("/__init__") in imported} | {
        "__init__.py"
    }


def _note_imports(names: Path) -> None:
    """Append the name of each module of samestep that this process, or a fork of it, imports; the audit is inherited by forks."""
    file = os.open(names, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(event: str, words: tuple[Any, ...]) -> None:
        if event == "import" and words[0].startswith("samestep."):
            os.write(file, f"{words[0].removeprefix('samestep.')}\n".encode())

    sys.addaudithook(note)


def _train_and_verify() -> None:
    """Train a small job for two steps in each of the layouts, and verify it."""
    import samestep

    for layout in LAYOUTS:
        family, more = ("mixtral", {"num_local_experts": 4}) if "ep=" in layout else ("llama", {})
        job = samestep.Job(
            model={"source": f"hf:{family}", "config": {**_SIZES, "vocab_size": 256, "num_key_value_heads": 2, **more}},
            data={"sequence_length": 16},
            train={"global_batch": 8, "steps": 2, "evaluate_samples": 0, "sample_tokens": 0},
            run={"device": "cpu"},
        )
        samestep.train(job, layout=layout, out=layout.replace(" ", "-"))
        verdict = samestep.verify(job, layout=layout, precision="float64")
        assert verdict.proven, verdict.to_text()


def _root() -> Path:
    import samestep

    return Path(samestep.__file__).parent


def _files() -> set[str]:
    return {str(path.relative_to(_root())) for path in _root().rglob("*.py")}


def _lines(files: set[str]) -> int:
    """Return the raw lines of files."""
    return sum((_root() / file).read_text(encoding="utf-8").count("\n") for file in files)


if __name__ == "__main__":
    _note_imports(Path(sys.argv[1]).resolve())
    _train_and_verify()
