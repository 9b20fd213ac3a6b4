"""The arguments of each verb of the command line, their help texts, and the parser that reports a mistake in one line."""

from __future__ import annotations

import difflib
import math
import sys
from argparse import ArgumentError, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_args

from samestep.errors import InputError, did_you_mean, is_layout, keys_named, word_of_others
from samestep.job import Job
from samestep.job_tables import MOST_STEPS, MayChange, Precision, Waiver
from samestep.layout import MOST_RANKS

JSON_ALONE = "--json=-"
"""`--json` without a file, as the parser takes it."""
_RENAMED = {"--emit": "--to", "--emit-file": "--to-file"}
"""Flags of the last release, and their names now; the release after 0.1.0 drops them."""
_ALLOWED = (*get_args(Waiver), *get_args(MayChange), "code")
"""The keys of `--allow`, of all commands."""


class Parser(ArgumentParser):
    """An argument parser that reports a mistake in one line, with the flag that was probably meant."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments, and refuse an unknown one, since the flags of the verb are known by now.

        Raises:
            InputError: an argument is unknown.
        """
        self._given = list(sys.argv[1:] if args is None else args)
        words, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag, hint = self._unknown(unknown[0])
            raise InputError("unknown-argument", f"unknown argument {flag}{hint}; see {self.prog} --help")
        return words, unknown

    def _unknown(self, word: str) -> tuple[str, str]:
        """Return an unknown flag, and the one that was probably meant as a hint."""
        flag = word.partition("=")[0]
        if flag == "--layout":
            return flag, ". Use samestep layouts --why-not LAYOUT to check one"
        known = self._option_string_actions.keys() - {"-h", "--help"}
        if not difflib.get_close_matches(flag, known, n=1, cutoff=0.8):
            name = next(keys_named(flag.lstrip("-").replace("-", "_"), Job), "") or word_of_others(flag)
            quoted = f'--layout "{name}"' if word.startswith("-") else f'quotes, as in --layout "dp=2 {name}"'
            meant = {"--set": f"--set {name}=VALUE", "--layout": quoted}
            use = "--layout" if is_layout(name) else "--set" if "." in name else name
            if name and use in known:
                return flag, f": use {meant.get(use, use)}"
        of_script = f". Use -- before arguments of the script: SCRIPT.py -- {word}" * self.prog.endswith(" launch")
        return flag, did_you_mean(flag, known) + of_script

    def _check_value(self, action: Any, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            words = f"must be one of {', '.join(map(str, action.choices))}, got {value!r}"
            raise ArgumentError(action, words + did_you_mean(str(value), map(str, action.choices)))

    def error(self, message: str) -> NoReturn:
        """Raise the mistake; where a flag is missing, an unknown one that may stand for it is named.

        Raises:
            InputError: always.
        """
        if "arguments are required" in message:
            known = self._option_string_actions
            unknown = (word for word in self._given if word.startswith("--") and word.partition("=")[0] not in known)
            if word := next(unknown, ""):
                message += f"; unknown argument {''.join(self._unknown(word))}"
        raise InputError("arguments", f"{message}; see {self.prog} --help")


def spell_out(words: Sequence[str]) -> list[str]:
    """Return the words of a command in which renamed flags have their new names, `--json` without a file is `--json=-`, and each key of
    `--allow` has a flag of its own.

    So a job file after one of them is not taken for its value.
    """
    spelled: list[str] = []
    rest = list(words)
    while rest and rest[0] != "--":
        flag, equals, value = rest.pop(0).partition("=")
        word = _RENAMED.get(flag, flag) + equals + value
        after = rest[0] if rest else "-"
        if word == "--json" and (after.startswith("-") or after.endswith(".toml")):
            rest = rest[1:] if after == "-" else rest
            spelled.append(JSON_ALONE)
        elif word == "--allow" and rest:
            keys = [rest.pop(0)]
            while rest and rest[0] in _ALLOWED:
                keys.append(rest.pop(0))
            spelled += [f"--allow={key}" for keys_of_word in keys for key in keys_of_word.split(",")]
        else:
            spelled.append(word)
    return spelled + rest


def verbs_of(parser: ArgumentParser) -> dict[str, tuple[str, ArgumentParser]]:
    """Return a line about each verb and its parser, by its name."""
    verbs: Any = next(action for action in parser._actions if isinstance(action.choices, dict))
    about = {action.dest: action.help or "" for action in verbs._get_subactions()}
    return {name: (about[name], choice) for name, choice in verbs.choices.items()}


def _add_job(parser: ArgumentParser) -> None:
    parser.add_argument(
        "job", nargs="?", type=Path, metavar="JOB.toml", help="the job file; default: the built-in job, a small Llama"
    )
    _add_set(parser)


def _add_set(parser: ArgumentParser) -> None:
    about = "override a key of the job, such as optimizer.lr=1e-3; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=about)


def _add_device(parser: ArgumentParser, about: str, default: str | None = "auto") -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default=default, help=about)


def _add_layout(parser: ArgumentParser, more: str = "") -> None:
    parser.add_argument(
        "--layout", metavar='"dp=2 zero=3"', help=f"the parallelism; default: the layout of the job{more}"
    )


def _add_allow(parser: ArgumentParser, *, resumes: bool = False) -> None:
    about = f"skip a check: {', '.join(get_args(Waiver))}"
    known = get_args(Waiver)
    if resumes:
        about += f". Let a key differ from the checkpoint: {', '.join(get_args(MayChange))}. Run functions that only a run folder or a checkpoint names: code"
        known += (*get_args(MayChange), "code")
    parser.add_argument("--allow", action="append", default=[], choices=known, metavar="KEY", help=about)


def _add_hardware(parser: ArgumentParser) -> None:
    about = (
        "the hardware profile; default: the profile of this machine if `measure` has written it, otherwise cpu-laptop"
    )
    parser.add_argument("--hardware", metavar="NAME|FILE", help=about)


def add_train(parser: ArgumentParser) -> None:
    """Add the arguments of `train`."""
    _add_job(parser)
    _add_layout(parser, "; auto: the layout that `plan` recommends for --ranks")
    about = "number of worker processes; default: the ranks of the layout. With MIN:MAX, a restart may continue with fewer than MAX"
    parser.add_argument("--ranks", type=_rank_range, default=(None, None), metavar="N|MIN:MAX", help=about)
    about = "end after step N; the learning-rate schedule does not change"
    parser.add_argument("--steps", type=_count, metavar="N", help=about)
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run folder; default: a new folder below runs/")
    about = "resume from the newest checkpoint in --out, or in the newest run below runs/"
    parser.add_argument("--resume", action="store_true", help=about)
    about = "start a new run from the weights of a run folder, a checkpoint (torch.distributed.checkpoint too), or a transformers folder"
    parser.add_argument("--init-from", type=Path, metavar="RUN", help=about)
    about = "resume the run in --out if it has a complete checkpoint; otherwise start it. Does nothing if the run is finished"
    parser.add_argument("--auto-resume", action="store_true", help=about)
    _add_allow(parser, resumes=True)
    _add_hosts(parser)
    about = "run `verify` first; train only if the layout gives the result of one device"
    parser.add_argument("--prove", action="store_true", help=about)
    about = "record where the time goes, for `samestep explain`: N steps, or steps A to B"
    parser.add_argument("--record", metavar="N|A:B", help=about)
    about = "print the bytes and samples of each rank and the keys that are not the default, then exit"
    parser.add_argument("--dry-run", action="store_true", help=about)


def _add_hosts(parser: ArgumentParser) -> None:
    about = "the hosts of the run: names (started over ssh), or their number (run the same command on each host)"
    parser.add_argument("--nodes", metavar="H1,H2|N", help=about)
    about = "the address of the leading host, with a free port; with names, the default is the first host"
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help=about)
    about = "with --nodes N: a file with a shared secret; `-` reads it from standard input, and closing standard input stops the run"
    parser.add_argument("--token-file", type=Path, metavar="FILE", help=about)


def add_launch(parser: ArgumentParser) -> None:
    """Add the arguments of `launch`."""
    parser.add_argument("script", type=Path, metavar="SCRIPT.py", help="the script; its own arguments follow after --")
    parser.add_argument(
        "--ranks", type=_ranks, metavar="N", help="the number of ranks; default: the ranks of the layout"
    )
    about = "the layout that parallelize uses in the script if it is given none"
    parser.add_argument("--layout", metavar='"dp=2 zero=3"', help=about)
    _add_device(parser, "the device of the ranks; default: auto (GPUs if there are any)")


def add_submit(parser: ArgumentParser) -> None:
    """Add the arguments of `submit`."""
    _add_job(parser)
    about = "the scheduler or launcher that starts the ranks: slurm, ray, kubernetes, mpi, ssh or torchrun"
    parser.add_argument("--on", required=True, metavar="BACKEND", help=about)
    parser.add_argument("--nodes", metavar="N|H1,H2", help="the number of nodes, or their names; default: 1")
    about = "the ranks on each node; default: the ranks of the layout, divided equally"
    parser.add_argument("--ranks-per-node", type=_ranks, metavar="M", help=about)
    _add_layout(parser)
    about = "the run folder, on storage that all nodes share; default: a folder below runs/ with the name of the job"
    parser.add_argument("--out", type=Path, metavar="DIR", help=about)
    parser.add_argument("--name", metavar="NAME", help="the name of the run; default: the name of the job file")
    about = "the settings of the cluster, such as a partition or an image, as TOML"
    parser.add_argument("--cluster", type=Path, metavar="FILE", help=about)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the script to FILE instead of submitting it")
    parser.add_argument("--dry-run", action="store_true", help="print the script; submit nothing")


def add_verify(parser: ArgumentParser) -> None:
    """Add the arguments of `verify`."""
    _add_job(parser)
    _add_layout(parser)
    _add_allow(parser)
    parser.add_argument(
        "--steps", type=_count, default=3, metavar="N", help="end after step N of the comparison; default: 3"
    )
    _add_device(parser, "the device that runs the comparison; default: run.device of the job", None)
    about = "float64: skip the second comparison, in the precision of the job; default: job"
    parser.add_argument("--precision", choices=("job", "float64"), default="job", help=about)
    about = "compare every valid layout of --devices, and each option by itself"
    parser.add_argument("--all", action="store_true", help=about)
    parser.add_argument("--devices", type=_ranks, metavar="N", help="with --all: the number of devices")


def add_export(parser: ArgumentParser) -> None:
    """Add the arguments of `export`."""
    _add_run(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the new folder")
    about = (
        "transformers: for from_pretrained, or adapters for peft; safetensors: the state dict in one file; dcp: for "
        "torch.distributed.checkpoint; default: safetensors for your own module, otherwise transformers"
    )
    parser.add_argument("--format", choices=("transformers", "safetensors", "dcp"), help=about)
    about = "the dtype of the weights; default: the dtype of the master weights"
    parser.add_argument("--dtype", choices=get_args(Precision), help=about)
    about = "merge the adapters (model.lora) into the weights and write the full model; default: the adapters, for peft"
    parser.add_argument("--merge", action="store_true", help=about)
    _add_ema(parser)


def add_sample(parser: ArgumentParser) -> None:
    """Add the arguments of `sample`."""
    _add_run(parser)
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--prompt", default="", metavar="TEXT", help="the text to continue; default: train.prompt of the job"
    )
    group.add_argument("--chat", metavar="TEXT", help="a message of a user; prints the reply")
    parser.add_argument(
        "--tokens", type=_count, metavar="N", help="the number of tokens to generate; default: train.sample_tokens"
    )
    about = "the sampling temperature; 0 always takes the most likely token; default: train.sample_temperature"
    parser.add_argument("--temperature", type=_number, metavar="T", help=about)
    parser.add_argument("--seed", type=int, metavar="N", help="the seed of the sampling; default: train.seed")
    _add_ema(parser)


def add_evaluate(parser: ArgumentParser) -> None:
    """Add the arguments of `evaluate`."""
    _add_run(parser)
    parser.add_argument(
        "--samples", type=_count, metavar="N", help="the number of validation samples; default: train.evaluate_samples"
    )
    _add_ema(parser)


def _add_run(parser: ArgumentParser) -> None:
    about = "a run folder (reads its newest checkpoint) or a checkpoint; default: the newest run below runs/"
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help=about)
    about = "code: run functions that only the checkpoint names"
    parser.add_argument("--allow", action="append", default=[], choices=("code",), metavar="KEY", help=about)


def _add_ema(parser: ArgumentParser) -> None:
    about = "use the moving averages of the weights (train.ema)"
    parser.add_argument("--ema", action="store_true", help=about)


def add_plan(parser: ArgumentParser) -> None:
    """Add the arguments of `plan`."""
    _add_job(parser)
    _add_hardware(parser)
    parser.add_argument("--devices", type=_ranks, required=True, metavar="N", help="the number of devices")
    parser.add_argument(
        "--top", type=_count, default=5, metavar="K", help="the number of layouts to print, at most 50; default: 5"
    )
    parser.add_argument("--why", metavar='"dp=2 ..."', help="explain why a layout is not the best one")
    about = "run the best K layouts for a few steps on this machine, and refit its hardware profile to the times"
    parser.add_argument("--measure-top", type=_count, default=0, metavar="K", help=about)
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("--fastest", action="store_true", help="use all devices (the default)")
    about = "use the smallest number of devices that can hold the job"
    wanted.add_argument("--fewest-devices", action="store_true", help=about)
    about = "the fraction of the memory of each device that a layout must leave free; default: 0.05"
    parser.add_argument("--keep-free", type=float, default=0.05, metavar="PART", help=about)
    about = "print how long training on this many tokens takes"
    parser.add_argument("--days-for-tokens", type=_above_0, metavar="2T", help=about)
    about = "the price of one device for one hour; prints the cost of the training"
    parser.add_argument("--cost-per-hour", type=_above_0, metavar="PRICE", help=about)
    _add_to(parser, "the fastest layout")
    _add_html(parser)


def _add_html(parser: ArgumentParser) -> None:
    about = "write a self-contained HTML page: the answer, the timeline of a step, and its memory"
    parser.add_argument("--html", type=Path, metavar="FILE", help=about)


def _add_to(parser: ArgumentParser, what: str) -> None:
    about = f"write {what} as a config of megatron, torchtitan, deepspeed, fsdp or accelerate, and list the parts that it cannot express"
    parser.add_argument("--to", metavar="FRAMEWORK", help=about)
    about = "write the config of --to into this file instead of printing it"
    parser.add_argument("--to-file", type=Path, metavar="FILE", help=about)


def add_simulate(parser: ArgumentParser) -> None:
    """Add the arguments of `simulate`."""
    _add_job(parser)
    _add_layout(parser)
    _add_hardware(parser)
    parser.add_argument(
        "--devices", type=_ranks, metavar="N", help="the number of devices; must equal the ranks of the layout"
    )
    parser.add_argument("--program", action="store_true", help="print every operation of the step")
    _add_to(parser, "the layout")
    _add_html(parser)
    about = "simulate a published run or a textbook comparison instead of a job; `--case list` lists them"
    parser.add_argument("--case", metavar="NAME", help=about)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace, which Perfetto opens")


def add_explain(parser: ArgumentParser) -> None:
    """Add the arguments of `explain`."""
    about = "a run folder with recorded steps (train --record); default: the newest run below runs/"
    about += ". Give two to compare them: a run folder, a layout, the word simulation, or a JSON file. Or give a folder of torch.profiler traces"
    parser.add_argument("run", nargs="*", metavar="RUN", help=about)
    about = "the step to explain, or several, averaged; default: all recorded steps except the first"
    parser.add_argument("--step", metavar="N|A:B", help=about)
    about = "the hardware profile of the prediction; default: the profile of this machine if `measure` has written it; for a layout, otherwise cpu-laptop"
    parser.add_argument("--hardware", metavar="NAME|FILE", help=about)
    _add_html(parser)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace, which Perfetto opens")


def add_layouts(parser: ArgumentParser) -> None:
    """Add the arguments of `layouts`."""
    _add_job(parser)
    about = "the number of devices; default: the ranks of the layout after --why-not"
    parser.add_argument("--devices", type=_ranks, metavar="N", help=about)
    about = "also list each split with every option, such as recompute or offload"
    parser.add_argument("--switches", action="store_true", help=about)
    about = "print every layout; default: the valid ones, and the rules that reject the others"
    parser.add_argument("--whole", action="store_true", help=about)
    about = "print which layout options can be combined, and the reason if two cannot"
    parser.add_argument("--pairs", action="store_true", help=about)
    parser.add_argument("--why-not", metavar='"dp=2 ..."', help="explain why a layout is rejected")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")


def add_profiles(parser: ArgumentParser) -> None:
    """Add the arguments of `profiles`."""
    about = "print a hardware profile as TOML, with the source of every number; a template for your own"
    parser.add_argument("--show", metavar="NAME", help=about)


def add_completion(parser: ArgumentParser) -> None:
    """Add the arguments of `completion`."""
    parser.add_argument(
        "shell", choices=("bash", "zsh", "fish", "tcsh"), metavar="SHELL", help="bash, zsh, fish or tcsh"
    )


def add_measure(parser: ArgumentParser) -> None:
    """Add the arguments of `measure`."""
    about = "the profile to write; default: the file that plan and simulate read"
    parser.add_argument("--out", type=Path, metavar="FILE", help=about)
    about = "the number of devices that measure at once; default: all GPUs, or all cores of the CPU"
    parser.add_argument("--ranks", type=_ranks, metavar="N", help=about)
    _add_device(parser, "the device to measure; default: auto (a GPU if there is one)")


def add_doctor(parser: ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    about = "the job to run; it is compared on all hosts, and the report ends with the bottleneck of its layout"
    parser.add_argument("job", nargs="?", type=Path, metavar="JOB.toml", help=about)
    _add_set(parser)
    _add_layout(parser, ", or the fastest one that `plan` finds")
    _add_hardware(parser)
    about = "a folder that all hosts must share; default: the current folder"
    parser.add_argument("--folder", type=Path, default=Path(), metavar="DIR", help=about)
    about = "write the hardware profile with the measured links"
    parser.add_argument("--out", type=Path, metavar="FILE", help=about)
    about = "the seconds to wait for the other hosts; default: 10"
    parser.add_argument("--wait", type=partial(_number, most=86_400), default=10.0, metavar="S", help=about)
    _add_hosts(parser)


def add_calibrate(parser: ArgumentParser) -> None:
    """Add the arguments of `calibrate`."""
    about = "CSV files with one line for each measured step of any framework, or run folders"
    parser.add_argument("rows", type=Path, nargs="+", metavar="ROWS.csv", help=about)
    parser.add_argument(
        "--job", type=Path, metavar="JOB", help="a job that supplies the columns missing from the CSV; default: none"
    )
    _add_set(parser)
    _add_hardware(parser)
    parser.add_argument("--out", type=Path, metavar="PROFILE", help="the profile to write; default: none")


COMMANDS: dict[str, tuple[str, Callable[[ArgumentParser], None]]] = {
    "train": ("train a job on this machine, or as one rank of torchrun or srun", add_train),
    "verify": ("compare a layout with one device on your job. Exit status: 0 equal, 1 different, 2 not possible", add_verify),
    "launch": ("run your script on the ranks of this machine", add_launch),
    "submit": ("submit a job to a cluster: Slurm, Kubernetes, Ray, MPI, ssh or torchrun", add_submit),
    "export": ("write the model of a run as a folder for transformers, peft or torch", add_export),
    "sample": ("generate text with the model of a run", add_sample),
    "evaluate": ("compute the validation loss of a checkpoint, in one process", add_evaluate),
    "plan": ("find the fastest layout that fits, and explain why the others do not; needs no torch", add_plan),
    "simulate": ("predict the time and memory of one layout; needs no torch", add_simulate),
    "explain": ("show where the time of recorded steps went, which ranks waited, and what to try", add_explain),
    "layouts": ("list the valid layouts of a job on N devices, and explain why another one is not valid", add_layouts),
    "inspect": ("print the blocks of the model, and which weights can be sharded", _add_job),
    "measure": ("benchmark this machine and write its hardware profile, in a minute or two", add_measure),
    "doctor": (
        "check all hosts of an allocation for faults and slow links, in half a minute. Exit status: 1 if there is a fault",
        add_doctor,
    ),
    "calibrate": ("refit a hardware profile to measured steps of any framework; needs no torch for presets", add_calibrate),
    "presets": ("list the models that plan and simulate have by name", lambda _: None),
    "profiles": ("list the hardware profiles that plan and simulate have by name", add_profiles),
    "env": ("print versions and devices, for a bug report", lambda _: None),
    "completion": ("print the completion script for a shell", add_completion),
}  # fmt: skip
"""The commands in the order of the help text, each with a line about it and the function that adds its arguments."""


def _count(text: str, most: int = MOST_STEPS) -> int:
    """Read a whole number of at least 1."""
    is_number = text.isdecimal() and text.isascii() and len(text.lstrip("0")) <= len(str(most))
    if not is_number or not 1 <= int(text) <= most:
        raise ArgumentTypeError(f"must be a whole number from 1 to {most}, got {text[:40]}")
    return int(text)


def _ranks(text: str) -> int:
    """Read a number of ranks or devices."""
    return _count(text, MOST_RANKS)


def _rank_range(text: str) -> tuple[int | None, int]:
    """Read a number of ranks, and before it the least number with which a restart may continue, if one is given."""
    least, colon, most = text.rpartition(":")
    if not colon:
        return None, _ranks(text)
    if _ranks(least) > _ranks(most):
        raise ArgumentTypeError(f"MIN is greater than MAX in {text}. Use {most}:{least}")
    return _ranks(least), _ranks(most)


def _number(text: str, least: float = 0.0, most: float = math.inf) -> float:
    """Read a number from `least` to `most`, which are included if they are finite."""
    with suppress(ValueError):
        if least <= float(text) <= most and float(text) < math.inf:
            return float(text)
    bound = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
    raise ArgumentTypeError(f"must be a number {bound}, got {text[:40]}")


def _above_0(text: str) -> float:
    """Read a number above 0, with K, M, B or T for thousands, millions and so on."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    with suppress(ArgumentTypeError):
        if number := scale * _number(text[:-1] if scale > 1.0 else text):
            return _number(str(number))
    raise ArgumentTypeError(f"must be a number greater than 0, such as 2.5, 300B or 2T, got {text[:40]}")
