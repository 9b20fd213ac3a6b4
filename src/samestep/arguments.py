"""The arguments of each verb of the command line, their help texts, and the parser that reports a mistake in one line."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from samestep.errors import InputError, did_you_mean
from samestep.job_tables import MOST_STEPS, MayChange, Precision, Waiver
from samestep.layout_limits import MOST_RANKS

JSON_ALONE = "--json=-"
"""`--json` without a file, as the parser takes it."""


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
            raise InputError(f"unknown argument {flag}{hint}; see {self.prog} --help")
        return words, unknown

    def _unknown(self, word: str) -> tuple[str, str]:
        """Return an unknown flag, and the one that was probably meant as a hint."""
        flag = word.partition("=")[0]
        return flag, did_you_mean(flag, self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """Raise the mistake; where a flag is missing, an unknown one that may stand for it is named.

        Raises:
            InputError: always.
        """
        if "arguments are required" in message:
            flags = (word for word in self._given if word.startswith("--"))
            unknown = (flag for flag in flags if flag.partition("=")[0] not in self._option_string_actions)
            message = "; ".join(
                [message, *(f"unknown argument {''.join(self._unknown(one))}" for one in [*unknown][:1])]
            )
        raise InputError(f"{message}; see {self.prog} --help")


def spell_out_json(words: Sequence[str]) -> list[str]:
    """Return the words of a command in which `--json` without a file is `--json=-`; a job after it is no file to write."""
    spelled = list(words)
    for place, word in enumerate(spelled):
        if word == "--":
            break
        after = spelled[place + 1] if place + 1 < len(spelled) else "-"
        if word == "--json" and after.endswith(".toml"):
            spelled[place] = JSON_ALONE
        elif word == "--json" and after.startswith("-"):
            spelled[place] = JSON_ALONE
            del spelled[place + 1 : place + 1 + (after == "-")]
    return spelled


def verbs_of(parser: ArgumentParser) -> dict[str, tuple[str, ArgumentParser]]:
    """Return a line about each verb and its parser, by its name."""
    verbs: Any = next(action for action in parser._actions if isinstance(action.choices, dict))
    about = {one.dest: one.help or "" for one in verbs._get_subactions()}
    return {name: (about[name], one) for name, one in verbs.choices.items()}


def add_json(parser: ArgumentParser) -> None:
    """Add what every verb takes: where its result goes as JSON."""
    about = "print the result as JSON and nothing else; with FILE, write it there and print the text"
    parser.add_argument("--json", type=Path, metavar="FILE", help=about)


def _add_job(parser: ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", type=Path, metavar="JOB.toml", help="default: samestep's own default job")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the job")


def _add_layout(parser: ArgumentParser, more: str = "") -> None:
    parser.add_argument("--layout", metavar='"dp=2 zero=3"', help=f"the layout; default: the job's own{more}")


def _add_allow(parser: ArgumentParser, *, resumes: bool = False) -> None:
    about = f"waive refusals of what is not proven, by their words: {', '.join(get_args(Waiver))}"
    known = get_args(Waiver)
    if resumes:
        about += f"; let a resume change keys: {', '.join(get_args(MayChange))}"
        about += "; and run functions that only a run folder or a checkpoint names: code"
        known += (*get_args(MayChange), "code")
    parser.add_argument("--allow", nargs="+", action="extend", default=[], choices=known, metavar="KEY", help=about)


def _add_hardware(parser: ArgumentParser) -> None:
    about = "a hardware profile; default: this machine's, once `measure` has written it, or else cpu-laptop"
    parser.add_argument("--hardware", metavar="NAME|FILE", help=about)


def add_train(parser: ArgumentParser) -> None:
    """Add the arguments of `train`."""
    _add_job(parser)
    _add_layout(parser, "; auto: the fastest that `plan` finds for --ranks")
    about = "worker processes; default: the ranks of the layout. With MIN:MAX, a restart may go on with fewer than MAX"
    parser.add_argument("--ranks", type=_rank_range, default=(None, None), metavar="N|MIN:MAX", help=about)
    about = "end after step N; the learning-rate schedule stays the job's"
    parser.add_argument("--steps", type=_count, metavar="N", help=about)
    parser.add_argument("--out", type=Path, metavar="DIR", help="run folder; default: a new one below runs/")
    about = "resume from the newest checkpoint in --out; default: in the newest run below runs/"
    parser.add_argument("--resume", action="store_true", help=about)
    about = "start a new run from the weights of a run folder, a checkpoint (also of torch.distributed.checkpoint), or a folder of transformers"
    parser.add_argument("--init-from", type=Path, metavar="RUN", help=about)
    about = "resume the run in --out if it has a whole checkpoint, else start it; one that is finished is left alone"
    parser.add_argument("--auto-resume", action="store_true", help=about)
    _add_allow(parser, resumes=True)
    _add_hosts(parser)
    about = "prove the layout first, as verify does, and train nothing where it differs from one device"
    parser.add_argument("--prove", action="store_true", help=about)
    about = "record where the time of N steps goes, for `samestep explain`; A:B records these"
    parser.add_argument("--record", metavar="N|A:B", help=about)
    about = "let torch.profiler run in recorded steps, so that `samestep explain` shows the kernels of each block"
    parser.add_argument("--kernels", action="store_true", help=about)
    about = "print the resolved job, and the bytes and samples of each rank; start nothing"
    parser.add_argument("--dry-run", action="store_true", help=about)


def _add_hosts(parser: ArgumentParser) -> None:
    about = (
        "the hosts of the run: their names, which are started over ssh; or their number, with the same command on each"
    )
    parser.add_argument("--nodes", metavar="H1,H2|N", help=about)
    about = "the address of the host that leads the run, with a free port; with names, by default that of the first one"
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help=about)
    about = "with a number of hosts: a secret, the same on all; -: the first line of standard input, whose end stops the run"
    parser.add_argument("--token-file", type=Path, metavar="FILE", help=about)


def add_launch(parser: ArgumentParser) -> None:
    """Add the arguments of `launch`."""
    _add_job(parser)
    about = "what starts the ranks: slurm, ray, kubernetes, mpi, ssh or torchrun"
    parser.add_argument("--on", required=True, metavar="ENGINE", help=about)
    parser.add_argument("--nodes", metavar="N|H1,H2", help="the number of nodes, or their names; default: 1")
    about = "the ranks on each node; default: the layout's, shared equally"
    parser.add_argument("--ranks-per-node", type=_ranks, metavar="M", help=about)
    _add_layout(parser)
    about = "the run folder, which all nodes see; default: one below runs/ by the name of the job"
    parser.add_argument("--out", type=Path, metavar="DIR", help=about)
    parser.add_argument("--name", metavar="NAME", help="the name of the run; default: that of the job file")
    about = "the settings of the site, such as a partition or an image, as TOML"
    parser.add_argument("--site", type=Path, metavar="FILE", help=about)
    parser.add_argument("--emit", type=Path, metavar="FILE", help="write the script to a file")
    parser.add_argument("--submit", action="store_true", help="hand the script over to the engine")


def add_verify(parser: ArgumentParser) -> None:
    """Add the arguments of `verify`."""
    _add_job(parser)
    _add_layout(parser)
    _add_allow(parser)
    parser.add_argument("--steps", type=_count, default=3, metavar="N", help="steps to compare; default: 3")
    about = "where the proof runs, for a job that trains elsewhere; default: the job's run.device"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help=about)
    about = "float64: leave out the second check, in the job's own precision; default: job"
    parser.add_argument("--precision", choices=("job", "float64"), default="job", help=about)
    about = "every legal split of --devices over the axes, and each switch by itself"
    parser.add_argument("--all", action="store_true", help=about)
    parser.add_argument("--devices", type=_ranks, metavar="N", help="with --all: the number of devices")


def add_export(parser: ArgumentParser) -> None:
    """Add the arguments of `export`."""
    _add_run(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the new folder")
    about = (
        "transformers: for from_pretrained, or adapters for peft; safetensors: one file with the plain state dict of any model; dcp: "
        "for torch.distributed.checkpoint; default: safetensors for a module of your own, else transformers"
    )
    parser.add_argument("--format", choices=("transformers", "safetensors", "dcp"), help=about)
    about = "the dtype of the weights; default: that of the master weights"
    parser.add_argument("--dtype", choices=get_args(Precision), help=about)
    about = (
        "write the whole model with its adapters (model.lora) added into its weights; default: the adapters, for peft"
    )
    parser.add_argument("--merge", action="store_true", help=about)
    _add_ema(parser)


def add_sample(parser: ArgumentParser) -> None:
    """Add the arguments of `sample`."""
    _add_run(parser)
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--prompt", default="", metavar="TEXT", help="the text to go on from; default: the job's")
    given.add_argument("--chat", metavar="TEXT", help="a user's message, to which the reply is written")
    parser.add_argument("--tokens", type=_count, metavar="N", help="tokens to write; default: the job's")
    about = "0 takes the likeliest token each time; default: the job's"
    parser.add_argument("--temperature", type=_temperature, metavar="T", help=about)
    parser.add_argument("--seed", type=int, metavar="N", help="the seed of the sampling; default: the job's")
    _add_ema(parser)


def add_evaluate(parser: ArgumentParser) -> None:
    """Add the arguments of `evaluate`."""
    _add_run(parser)
    parser.add_argument("--samples", type=_count, metavar="N", help="held-out samples; default: the job's")
    _add_ema(parser)


def _add_run(parser: ArgumentParser) -> None:
    about = "a run folder, whose newest checkpoint is read, or one checkpoint; default: the newest run below runs/"
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help=about)
    about = "code: run the functions that the checkpoint names, where no run of yours has named them"
    parser.add_argument("--allow", nargs="+", action="extend", default=[], choices=("code",), metavar="KEY", help=about)


def _add_ema(parser: ArgumentParser) -> None:
    about = "take the moving averages of the weights (train.ema) in their place"
    parser.add_argument("--ema", action="store_true", help=about)


def add_plan(parser: ArgumentParser) -> None:
    """Add the arguments of `plan`."""
    _add_job(parser)
    _add_hardware(parser)
    parser.add_argument("--devices", type=_ranks, required=True, metavar="N", help="the number of devices")
    parser.add_argument("--top", type=_count, default=5, metavar="K", help="layouts to print, at most 50; default: 5")
    parser.add_argument("--why", metavar='"dp=2 ..."', help="say why one layout is not the best")
    about = "run the best K layouts for a few steps on this machine, and refit its profile to the times"
    parser.add_argument("--measure-top", type=_count, default=0, metavar="K", help=about)
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("--fastest", action="store_true", help="use all devices; the default")
    about = "use the smallest number of devices that the job fits on"
    wanted.add_argument("--fewest-devices", action="store_true", help=about)
    about = "the part of each device's memory that a layout must leave free; default: 0.05"
    parser.add_argument("--keep-free", type=float, default=0.05, metavar="PART", help=about)
    about = "say how long training on this many tokens takes"
    parser.add_argument("--days-for-tokens", type=_num_tokens, metavar="2T", help=about)
    about = "the price of one device for an hour: say what training costs"
    parser.add_argument("--cost-per-hour", type=_price, metavar="PRICE", help=about)
    _add_emit(parser, "the fastest layout")
    _add_html(parser)


def _add_html(parser: ArgumentParser) -> None:
    about = "write a page with the answer, the step on a timeline and its memory, which needs no other file"
    parser.add_argument("--html", type=Path, metavar="FILE", help=about)


def _add_emit(parser: ArgumentParser, what: str) -> None:
    about = f"write {what} in the words of megatron, torchtitan, deepspeed, fsdp or accelerate, and what that one cannot do of it"
    parser.add_argument("--emit", metavar="FRAMEWORK", help=about)
    about = "the file that --emit writes; without it the text is printed"
    parser.add_argument("--emit-file", type=Path, metavar="FILE", help=about)


def add_simulate(parser: ArgumentParser) -> None:
    """Add the arguments of `simulate`."""
    _add_job(parser)
    _add_layout(parser)
    _add_hardware(parser)
    parser.add_argument("--devices", type=_ranks, metavar="N", help="must equal the layout's ranks")
    parser.add_argument("--program", action="store_true", help="print every op, however many there are")
    _add_emit(parser, "the layout")
    _add_html(parser)
    about = "play a published run or a textbook comparison instead of a job; `--case list` lists them"
    parser.add_argument("--case", metavar="NAME", help=about)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace, which Perfetto opens")


def add_explain(parser: ArgumentParser) -> None:
    """Add the arguments of `explain`."""
    about = "a run folder with recorded steps (train --record); default: the newest run below runs/"
    about += "; two of a run folder, a layout, the word simulation and the JSON file of one: their differences; or a folder of traces of torch.profiler"
    parser.add_argument("run", nargs="*", metavar="RUN", help=about)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--step", type=_count, metavar="N", help="one step; default: all recorded ones but the first")
    chosen.add_argument("--steps", metavar="A:B", help="some steps, averaged")
    about = "a hardware profile to predict the step with; default: this machine's, once `measure` has written it; layouts: else cpu-laptop"
    parser.add_argument("--hardware", metavar="NAME|FILE", help=about)
    _add_html(parser)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace, which Perfetto opens")


def add_layouts(parser: ArgumentParser) -> None:
    """Add the arguments of `layouts`."""
    _add_job(parser)
    parser.add_argument("--devices", type=_ranks, required=True, metavar="N", help="the number of devices")
    about = "list each split also with every switch, such as recompute or offload"
    parser.add_argument("--switches", action="store_true", help=about)
    about = "print every layout, and not the legal ones and the rules by which the others are refused"
    parser.add_argument("--whole", action="store_true", help=about)
    about = "print which layout words can be combined, and the reason where two cannot"
    parser.add_argument("--pairs", action="store_true", help=about)
    parser.add_argument("--why-not", metavar='"dp=2 ..."', help="say why one layout is refused")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")


def add_inspect(parser: ArgumentParser) -> None:
    """Add the arguments of `inspect`."""
    _add_job(parser)


def add_profiles(parser: ArgumentParser) -> None:
    """Add the arguments of `profiles`."""
    about = "print one profile as TOML, with the source of every number: a file to begin one of your own with"
    parser.add_argument("--show", metavar="NAME", help=about)


def add_completion(parser: ArgumentParser) -> None:
    """Add the arguments of `completion`."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")


def add_measure(parser: ArgumentParser) -> None:
    """Add the arguments of `measure`."""
    about = "the profile to write; default: this machine's own, where plan and simulate look for it"
    parser.add_argument("--out", type=Path, metavar="FILE", help=about)
    about = "devices that measure at once; default: all GPUs, or the CPU's cores"
    parser.add_argument("--ranks", type=_ranks, metavar="N", help=about)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")


def add_doctor(parser: ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    about = "the job that is to run: it is compared, and the report ends with what its layout would be bound by"
    parser.add_argument("job", nargs="?", type=Path, metavar="JOB.toml", help=about)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the job")
    _add_layout(parser, ", or the fastest that `plan` finds")
    _add_hardware(parser)
    about = "the folder that all hosts are to see; default: the one that this command runs in"
    parser.add_argument("--folder", type=Path, default=Path(), metavar="DIR", help=about)
    about = "write the hardware profile with the links that were measured"
    parser.add_argument("--out", type=Path, metavar="FILE", help=about)
    about = "seconds to wait for the other hosts; default: 10"
    parser.add_argument("--wait", type=_seconds, default=10.0, metavar="S", help=about)
    _add_hosts(parser)


def _seconds(text: str) -> float:
    """Read a number of seconds from 0 to a day."""
    number = _number(text)
    if not 0 <= number <= 86_400:
        raise ArgumentTypeError(f"{text} is not a number of seconds; 10 and 0.5 are")
    return number


def add_calibrate(parser: ArgumentParser) -> None:
    """Add the arguments of `calibrate`."""
    about = "CSV files with a line for each measured step, of any framework, or folders of runs"
    parser.add_argument("rows", type=Path, nargs="+", metavar="ROWS.csv", help=about)
    parser.add_argument("--job", type=Path, metavar="JOB", help="what the rows do not say; default: nothing")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set a key of that job")
    _add_hardware(parser)
    parser.add_argument("--out", type=Path, metavar="PROFILE", help="the profile to write; default: none")


def _count(text: str, most: int = MOST_STEPS) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or not text.isascii() or not text.strip("0"):
        raise ArgumentTypeError(f"{text} is not a whole number of at least 1")
    if len(text) > len(str(most)) or int(text) > most:
        raise ArgumentTypeError(f"{text[:40]} is more than {most}, the largest number that works")
    return int(text)


def _ranks(text: str) -> int:
    """Read a number of ranks or devices."""
    return _count(text, MOST_RANKS)


def _rank_range(text: str) -> tuple[int | None, int]:
    """Read a number of ranks, and the least number to go on with if one is given before it."""
    least, colon, most = text.rpartition(":")
    if not colon:
        return None, _ranks(text)
    if _ranks(least) > _ranks(most):
        raise ArgumentTypeError(f"{text} has no number between its ends; {most}:{least} has")
    return _ranks(least), _ranks(most)


def _price(text: str) -> float:
    """Read a price above zero."""
    number = _number(text)
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text} is not a price; 2.5 is one")
    return number


def _temperature(text: str) -> float:
    """Read a temperature of at least zero."""
    number = _number(text)
    if not 0 <= number < float("inf"):
        raise ArgumentTypeError(f"{text} is not a temperature; 0 and 0.8 are")
    return number


def _num_tokens(text: str) -> float:
    """Read a number of tokens, with 300B for 3e11."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    number = scale * _number(text[:-1] if scale > 1.0 else text)
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text} is not a number of tokens; 2T, 300B and 1e12 work")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
