"""The command line: parse words, call one function, print. Each verb is imported when it is called.

Exit status: 0 done, or ended by Ctrl-C or SIGTERM with a checkpoint; 1 a run failed (a worker died, numbers are not
finite); 2 what was given cannot run; 130 and 143 killed by a second Ctrl-C or SIGTERM, or before there was a run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any, NoReturn

from samestep import job as jobs
from samestep.errors import (
    CheckpointError,
    InputError,
    LayoutError,
    RunError,
    WorkerError,
    did_you_mean,
)
from samestep.layout import Layout


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit status. A user's mistake prints one line, never a traceback."""
    warnings.showwarning = _say_warning
    words = _parser().parse_args(arguments)
    try:
        for flag in ("json", "trace", "html"):
            _check_writable(getattr(words, flag, None))
        return int(words.verb(words) or 0)
    except RunError as error:
        return _fail(error, 1)
    except InputError as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # Who read our output has gone; what is left of it would be written, and fail again, at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _Parser(argparse.ArgumentParser):
    """Says a mistake in one line, with the flag that was probably meant."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown words here, where the verb's own flags are known."""
        self._given = list(sys.argv[1:] if args is None else args)
        words, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._of_unknown(unknown[0]))
        return words, unknown

    def _of_unknown(self, word: str) -> str:
        flag = word.partition("=")[0]
        return f"unknown argument {flag}{did_you_mean(flag, self._option_string_actions)}"

    def error(self, message: str) -> NoReturn:
        """Exit with status 2; where something is missing, an unknown flag may be what was meant by it."""
        if "arguments are required" in message:
            flags = (word for word in self._given if word.startswith("--"))
            unknown = (flag for flag in flags if flag.partition("=")[0] not in self._option_string_actions)
            message = "; ".join([message, *map(self._of_unknown, [*unknown][:1])])
        self.exit(2, f"samestep: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="samestep",
        allow_abbrev=False,
        description="Distributed training for PyTorch: changing the layout never changes the result.",
    )
    parser.add_argument("--version", action="version", version=f"samestep {metadata.version('samestep')}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    _add_train(verbs)
    _add_verify(verbs)
    _add_plan(verbs)
    _add_simulate(verbs)
    _add_layouts(verbs)
    _add_measure(verbs)
    env = verbs.add_parser("env", help="versions and devices, for a bug report", allow_abbrev=False)
    env.set_defaults(verb=_env)
    return parser


def _add_job(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument("job", nargs="?", type=Path, metavar="JOB.toml", help="default: samestep's own default job")
    parser.add_argument("--layout", metavar='"dp=2 zero=3"', help=f"where: layout words; default: the job's own{more}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the job")


def _add_train(verbs: Any) -> None:
    parser = verbs.add_parser(
        "train", help="train a job on this machine, or as a rank of torchrun or srun", allow_abbrev=False
    )
    _add_job(parser, "; auto: the fastest that `plan` finds for --ranks")
    parser.add_argument("--ranks", type=_positive, metavar="N", help="worker processes; default: as the layout says")
    parser.add_argument("--steps", type=_positive, metavar="N", help="end after step N; the schedule stays as it is")
    parser.add_argument("--out", type=Path, metavar="DIR", help="run folder; default: a new one below runs/")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint of --out; default: of the newest run"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and start nothing")
    parser.set_defaults(verb=_train)


def _add_verify(verbs: Any) -> None:
    parser = verbs.add_parser(
        "verify",
        help="prove that a layout computes what one device computes: exit 0 proven, 1 differs, 2 could not be tried",
        allow_abbrev=False,
    )
    _add_job(parser)
    parser.add_argument("--steps", type=_positive, default=3, metavar="N", help="steps to compare; default: 3")
    parser.add_argument(
        "--precision", choices=("job", "float64"), default="job", help="float64: leave out the job's own precision"
    )
    parser.add_argument("--all", action="store_true", help="try every legal layout of --devices")
    parser.add_argument("--devices", type=_positive, metavar="N", help="with --all: how many")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdict")
    parser.set_defaults(verb=_verify)


def _add_plan(verbs: Any) -> None:
    parser = verbs.add_parser(
        "plan", help="which layout fits and is fastest, and why not the others; needs no torch", allow_abbrev=False
    )
    parser.add_argument("job", nargs="?", type=Path, metavar="JOB.toml", help="default: samestep's own default job")
    parser.add_argument("--hardware", metavar="NAME|FILE", help="default: what `measure` found here, or cpu-laptop")
    parser.add_argument("--devices", type=_positive, required=True, metavar="N", help="how many there are")
    parser.add_argument(
        "--top", type=_rows, default=5, metavar="K", help=f"rows of the table, {_MOST_ROWS} at most; default: 5"
    )
    parser.add_argument("--why", metavar='"dp=2 ..."', help="say why one layout is not the best")
    parser.add_argument(
        "--measure-top", type=_positive, metavar="K",
        help="run the best K for a few steps on this machine, and refit its own profile to them",
    )  # fmt: skip
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("--fastest", action="store_true", help="use all devices; the default")
    wanted.add_argument("--fewest-devices", action="store_true", help="the smallest number that the job fits on")
    parser.add_argument("--days-for-tokens", type=_quantity, metavar="2T", help="say how long so many tokens take")
    parser.add_argument("--cost-per-hour", type=_price, metavar="PRICE", help="of one device: say what it costs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the job")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan")
    parser.set_defaults(verb=_plan)


def _add_simulate(verbs: Any) -> None:
    parser = verbs.add_parser(
        "simulate", help="print the step as a program and play it on a clock; needs no torch", allow_abbrev=False
    )
    _add_job(parser)
    parser.add_argument("--hardware", metavar="NAME|FILE", help="default: what `measure` found here, or cpu-laptop")
    parser.add_argument("--devices", type=_positive, metavar="N", help="must equal the layout's ranks")
    parser.add_argument("--program", action="store_true", help="list every op, however many there are")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    parser.add_argument("--html", type=Path, metavar="FILE", help="draw the step as a page that needs nothing else")
    parser.add_argument("--case", metavar="NAME", help="a famous run or comparison instead of a job; list names them")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace (Perfetto opens it)")
    parser.set_defaults(verb=_simulate)


def _add_measure(verbs: Any) -> None:
    parser = verbs.add_parser(
        "measure", help="write this machine's hardware profile, in a minute or two", allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: where plan and simulate look for it")
    parser.add_argument("--ranks", type=_positive, metavar="N", help="devices at once; default: all GPUs, or the cores")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.set_defaults(verb=_measure)


def _add_layouts(verbs: Any) -> None:
    parser = verbs.add_parser(
        "layouts", help="which layouts a job may have on N devices, and why not the others", allow_abbrev=False
    )
    parser.add_argument("job", nargs="?", type=Path, metavar="JOB.toml", help="default: samestep's own default job")
    parser.add_argument("--devices", type=_positive, required=True, metavar="N")
    parser.add_argument("--switches", action="store_true", help="each split with every switch, as recompute or offload")
    parser.add_argument("--pairs", action="store_true", help="which words compose with which, and why not the others")
    parser.add_argument("--why-not", metavar='"dp=2 ..."', help="say what one layout is refused for")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the job")
    parser.add_argument("--markdown", action="store_true", help="print the table for a document")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table")
    parser.set_defaults(verb=_layouts)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


_MOST_ROWS = 50
"""Of the table of layouts: each of them, and many that might be among them, are played."""


def _rows(text: str) -> int:
    if _positive(text) > _MOST_ROWS:
        raise argparse.ArgumentTypeError(f"{text} rows are too many to play; {_MOST_ROWS} works")
    return int(text)


def _price(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no price; 2.5 is")
    return number


def _quantity(text: str) -> float:
    """Read 300B as 3e11."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    try:
        number = float(text[:-1] if scale > 1.0 else text) * scale
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of tokens; 2T, 300B or 1e12 are")
    return number


def _job(words: argparse.Namespace, run_folder: Path | None = None) -> jobs.Job:
    """Read the job that the words name; without one a resumed run goes on with its own."""
    if words.job is not None:
        return jobs.load(words.job, words.set)
    if run_folder is not None and (run_folder / "job.toml").exists():
        return jobs.load(run_folder / "job.toml", words.set)
    given = {key.strip(): value.strip() for key, _, value in (setting.partition("=") for setting in words.set)}
    # Fields of the default model mean nothing to another one; a preset knows its own sequences.
    without = ["model.config"] * ("model.source" in given)
    without += ["data.sequence_length"] * given.get("model.source", "").strip("\"'").startswith(jobs.PRESET)
    with resources.as_file(resources.files("samestep") / "default_job.toml") as default:
        return jobs.load(default, words.set, without)


def _newest_run() -> Path:
    """Return the run below `runs` that was started or resumed last."""
    found = [(path.stat().st_mtime, path.parent) for path in Path("runs").glob("*/job.toml")]
    if not found:
        raise CheckpointError("there is no run below runs/ to go on with; --out names another folder")
    return max(found)[1]


def _train(words: argparse.Namespace) -> int:
    out = _newest_run() if words.resume and words.out is None else words.out
    job = _job(words, out if words.resume else None)
    # Before torch is imported: a process that has used an OpenMP pool cannot be forked.
    os.environ.setdefault("OMP_NUM_THREADS", str(job.run.threads))
    given = {"layout": words.layout, "ranks": words.ranks, "steps": words.steps, "out": out, "resume": words.resume}
    if words.dry_run:
        return _dry_run(job, given)
    from samestep.training import train

    train(job, **given)
    return 0


def _dry_run(job: jobs.Job, given: dict[str, Any]) -> int:
    from samestep.memory import at_rest, states_per_param
    from samestep.strategies import program_of
    from samestep.training import check, step_samples

    checked = check(job, **given)
    layout = checked.layout
    if checked.why:
        print(checked.why)
    programs = [
        program_of(checked.workload.spec, job, layout, job.run.ranks_per_node, stage=stage)
        for stage in range(layout.pp)
    ]
    program = programs[0]
    print(checked.job.to_toml())
    count, size, ranks = program.step.num_microbatches, program.step.microbatch_samples, layout.world_size
    print(
        f'layout "{layout}": {ranks} rank{"s" * (ranks > 1)}, {count} micro-batch{"es" * (count > 1)} '
        f"of at most {size} sample{'s' * (size > 1)}"
    )
    samples_of = step_samples(job, layout, checked.workload.dataset)
    for rank in range(ranks):
        use = at_rest(programs[rank * layout.pp // ranks], states_per_param(job), rank)
        samples = samples_of[rank // (layout.tp * layout.cp) % layout.dp]
        print(
            f"rank {rank}: weights {use.weights:,} B, gradients {use.gradients:,} B, optimizer {use.optimizer:,} B; "
            f"samples of step 1: {' '.join(map(str, samples)) or 'none'}"
        )
    return 0


def _verify(words: argparse.Namespace) -> int:
    job = _job(words)
    os.environ.setdefault("OMP_NUM_THREADS", str(job.run.threads))
    from samestep import proof

    if words.all == (words.layout is not None) or words.all != (words.devices is not None):
        raise LayoutError('verify tries one layout, --layout "dp=2 tp=2", or all of a number: --all --devices 4')
    layouts = _legal_layouts(job, words.devices) if words.all else [Layout.parse(words.layout)]
    verdicts = []
    for layout in layouts:
        try:
            verdict = proof.verify(job, layout=layout, steps=words.steps, precision=words.precision)
        except WorkerError as error:
            return _fail(f"layout {str(layout)!r} could not be tried: {error}", 2)
        print(verdict.to_line() if words.all else verdict.to_text(), flush=True)
        verdicts.append(verdict)
    if words.json:
        records = [verdict.to_record() for verdict in verdicts]
        _write(words.json, json.dumps(records if words.all else records[0], indent=1) + "\n")
    return 0 if all(verdict.proven for verdict in verdicts) else 1


def _legal_layouts(job: jobs.Job, devices: int) -> list[Layout]:
    from samestep import catalog, legality

    model = catalog.model_spec(job)
    rows = [legality.row_of(model, job, layout) for layout in legality.layouts_of(devices, switches=True)]
    return [row.layout for row in rows if not row.reason]


def _plan(words: argparse.Namespace) -> int:
    from samestep import advice, catalog, memory, ranking, search

    job = _job(words)
    asked = None if words.why is None else Layout.parse(words.why)
    if words.measure_top:
        _check_rehearsal(words, job)
    machine = _machine(words, words.devices)
    states, model = memory.states_per_param(job), catalog.model_spec(job)
    if words.fewest_devices:
        found = search.fewest(model, job, machine, words.devices, top=words.top, states_per_param=states)
    else:
        found = search.plan(model, job, machine, words.devices, top=words.top, states_per_param=states)
    print(ranking.as_text(found))
    if asked is not None:
        print(ranking.explain_layout(model, job, machine, asked, found, states))
    if found.best and (words.days_for_tokens or words.cost_per_hour):
        for line in ranking.answers(found.best[0], words.days_for_tokens, words.cost_per_hour):
            print(line)
    record = ranking.as_record(found)
    if found.best:
        saved = advice.savings(found.best[0], model, job, machine, states)
        for saving in saved:
            print(f"with other numerics, the job's to choose: {saving.to_line()}")
        record["other_numerics"] = [saving.to_record() for saving in saved]
    if words.measure_top and found.best:
        record["measured"] = _rehearse(job, found.best[: words.measure_top], machine)
    if words.json:
        _write(words.json, json.dumps(record, indent=1) + "\n")
    return 0 if found.best else 1


def _check_rehearsal(words: argparse.Namespace, job: jobs.Job) -> None:
    """Refuse before anything is searched what could not be run afterwards."""
    from samestep import hardware

    if words.hardware not in (None, hardware.OWN):
        raise InputError(
            f"--measure-top runs on this machine, and --hardware {words.hardware} is another: leave it out"
        )
    if job.model.preset is not None:
        raise InputError(
            f"--measure-top runs steps, and {job.model.source} is a model in numbers only: hf: or your own works"
        )
    words.top = max(words.top, words.measure_top)


def _rehearse(job: jobs.Job, best: Sequence[Any], machine: Any) -> list[dict[str, Any]]:
    os.environ.setdefault("OMP_NUM_THREADS", str(job.run.threads))
    from samestep import rehearsal

    rows, path = rehearsal.rehearse(job, best, machine)
    print(rehearsal.as_text(rows))
    print(f"refitted: {path}; plan, simulate and train --layout auto read it")
    return [
        {
            "layout": str(row.layout),
            "foreseen_s": row.foreseen_s,
            "measured_s": row.measured_s,
            "refitted_s": row.refitted_s,
        }
        for row in rows
    ]


def _simulate(words: argparse.Namespace) -> int:
    from samestep import catalog, listing, memory
    from samestep.prediction import predict

    if words.case is not None:
        return _case(words)
    job = _job(words)
    layout = Layout.parse(words.layout) if words.layout is not None else Layout.of(job.layout)
    if words.devices not in (None, layout.world_size):
        if words.layout is not None or job.layout:
            raise LayoutError(
                f"--devices {words.devices}, but layout {str(layout)!r} has {layout.world_size} ranks: "
                "leave --devices out, or let the degrees multiply to it"
            )
        layout = Layout(dp_replicate=words.devices)
    machine = _machine(words, layout.world_size)
    found = predict(catalog.model_spec(job), job, layout, machine, memory.states_per_param(job))
    print(listing.as_text(found, whole=words.program))
    _write_prediction(found, words)
    return 0


def _case(words: argparse.Namespace) -> int:
    from samestep import cases

    given = [flag for flag in ("job", "layout", "set", "hardware", "devices", "program") if getattr(words, flag)]
    if given:
        name = given[0] if given[0] == "job" else f"--{given[0]}"
        raise InputError(f"--case {words.case} has a job and a layout of its own: leave {name} out")
    wanted = [flag for flag in ("json", "trace", "html") if getattr(words, flag)]
    if wanted and words.case not in cases.RUNS:
        raise InputError(f"--{wanted[0]} is about one step: of the cases {', '.join(cases.RUNS)} have one")
    print("\n".join(cases.lines_of(words.case)))
    if wanted:
        _write_prediction(cases.RUNS[words.case].predict(), words)
    return 0


def _write_prediction(found: Any, words: argparse.Namespace) -> None:
    from samestep.picture import to_html

    if words.json:
        _write(words.json, json.dumps(found.to_record(), indent=1) + "\n")
    if words.trace:
        _write(words.trace, json.dumps(found.timeline.to_chrome_trace()))
    if words.html:
        _write(words.html, to_html(found))


def _machine(words: argparse.Namespace, devices: int) -> Any:
    """Load the hardware that the words name; without them what was measured here, and say what speaks against it."""
    from samestep import hardware

    if words.hardware is not None:
        return hardware.load(words.hardware)
    machine = hardware.own_or("cpu-laptop")
    for line in hardware.cautions_here(machine, devices):
        print(line)
    return machine


def _measure(words: argparse.Namespace) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from samestep import hardware
    from samestep.measurement import measure
    from samestep.memory import readable

    machine = measure(words.out, ranks=words.ranks, device=words.device)
    path = words.out or hardware.own_path()
    rates = ", ".join(f"{dtype} {rate / 1e9:.4g}" for dtype, rate in machine.flops_per_s.items())
    count, link = machine.devices_per_node, machine.intra
    print(f"{count} device{'s' * (count > 1)} of {readable(machine.memory_bytes)}; GFLOP/s: {rates}")
    print(f"memory {machine.memory_bytes_per_s / 1e9:.4g} GB/s, launch {machine.launch_s * 1e6:.3g} us, ", end="")
    if count > 1:
        print(
            f"link {link.bytes_per_s / 1e9:.4g} GB/s, {link.latency_s * 1e6:.4g} us a hop, "
            f"{link.collective_s * 1e6:.4g} us a call"
        )
    else:
        print("no link measured: one device sends nothing, and what the profile says of links is assumed")
    print(f"written: {path}; every number has its source there")
    return 0


def _check_writable(path: Path | None) -> None:
    """Refuse before any work what could not be written after it."""
    if path is not None and not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {path.parent}")
    if path is not None and path.is_dir():
        raise InputError(f"{path} cannot be written: it is a folder")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def _layouts(words: argparse.Namespace) -> int:
    from samestep import catalog, legality

    job = _job(words)
    asked = None if words.why_not is None else Layout.parse(words.why_not)
    model = catalog.model_spec(job)
    if asked is not None:
        reason = legality.row_of(model, job, asked).reason
        if asked.world_size != words.devices:
            named = f"--devices {words.devices}, but layout {str(asked)!r} has {asked.world_size} ranks"
            print(f"{named}, on which it is {f'refused: {reason}' if reason else 'legal'}")
        else:
            print(reason or f'"{asked}" is legal')
        return 0
    if words.pairs:
        print(legality.matrix(legality.pairs(model, job), markdown=words.markdown))
        return 0
    rows = [legality.row_of(model, job, lay) for lay in legality.layouts_of(words.devices, switches=words.switches)]
    print(legality.as_markdown(rows) if words.markdown else legality.as_text(rows))
    if words.json:
        _write(words.json, json.dumps([legality.as_record(row) for row in rows], indent=1) + "\n")
    return 0


def _env(words: argparse.Namespace) -> int:
    import platform

    print(f"python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores")
    for package in ("samestep", "torch", "numpy", "transformers", "tokenizers", "safetensors"):
        try:
            print(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            print(package, "is not installed")
    import torch

    for index in range(torch.cuda.device_count()):
        print("GPU", index, torch.cuda.get_device_name(index))
    return 0


def _fail(error: Exception | str, status: int) -> int:
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # a worker that was killed has left its live line without a cursor
    print(f"samestep: {error}", file=sys.stderr)
    return status


def _say_warning(message: Warning | str, category: Any, *_: Any, **__: Any) -> None:
    """Print a warning as one line; those of libraries under us are for developers."""
    if category is UserWarning:
        print(f"samestep: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
