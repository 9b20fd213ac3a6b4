"""Words of the command line: those of each verb, numbers as people write them, and the flag that was probably meant."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from samestep.errors import did_you_mean


class Parser(ArgumentParser):
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


def _add_job(parser: ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", type=Path, metavar="JOB.toml", help="default: samestep's own default job")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the job")


def _add_layout(parser: ArgumentParser, more: str = "") -> None:
    parser.add_argument("--layout", metavar='"dp=2 zero=3"', help=f"where: layout words; default: the job's own{more}")


def _add_hardware(parser: ArgumentParser) -> None:
    parser.add_argument("--hardware", metavar="NAME|FILE", help="default: what `measure` found here, or cpu-laptop")


def add_train(parser: ArgumentParser) -> None:
    """Add the words of `train`."""
    _add_job(parser)
    _add_layout(parser, "; auto: the fastest that `plan` finds for --ranks")
    parser.add_argument("--ranks", type=_count, metavar="N", help="worker processes; default: as the layout says")
    parser.add_argument("--steps", type=_count, metavar="N", help="end after step N; the schedule stays as it is")
    parser.add_argument("--out", type=Path, metavar="DIR", help="run folder; default: a new one below runs/")
    about = "go on from the newest checkpoint of --out; default: of the newest run"
    parser.add_argument("--resume", action="store_true", help=about)
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and start nothing")


def add_verify(parser: ArgumentParser) -> None:
    """Add the words of `verify`."""
    _add_job(parser)
    _add_layout(parser)
    parser.add_argument("--steps", type=_count, default=3, metavar="N", help="steps to compare; default: 3")
    about = "float64: leave out the job's own precision"
    parser.add_argument("--precision", choices=("job", "float64"), default="job", help=about)
    parser.add_argument("--all", action="store_true", help="try every legal layout of --devices")
    parser.add_argument("--devices", type=_count, metavar="N", help="with --all: how many")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdict")


def add_plan(parser: ArgumentParser) -> None:
    """Add the words of `plan`."""
    _add_job(parser)
    _add_hardware(parser)
    parser.add_argument("--devices", type=_count, required=True, metavar="N", help="how many there are")
    parser.add_argument("--top", type=_count, default=5, metavar="K", help="rows, 50 at most; default: 5")
    parser.add_argument("--why", metavar='"dp=2 ..."', help="say why one layout is not the best")
    about = "run the best K for a few steps on this machine, and refit its own profile to them"
    parser.add_argument("--measure-top", type=_count, default=0, metavar="K", help=about)
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("--fastest", action="store_true", help="use all devices; the default")
    wanted.add_argument("--fewest-devices", action="store_true", help="the smallest number that the job fits on")
    parser.add_argument("--days-for-tokens", type=_num_tokens, metavar="2T", help="say how long so many tokens take")
    parser.add_argument("--cost-per-hour", type=_price, metavar="PRICE", help="of one device: say what it costs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan")


def add_simulate(parser: ArgumentParser) -> None:
    """Add the words of `simulate`."""
    _add_job(parser)
    _add_layout(parser)
    _add_hardware(parser)
    parser.add_argument("--devices", type=_count, metavar="N", help="must equal the layout's ranks")
    parser.add_argument("--program", action="store_true", help="list every op, however many there are")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    parser.add_argument("--html", type=Path, metavar="FILE", help="draw the step as a page that needs nothing else")
    parser.add_argument("--case", metavar="NAME", help="a famous run or comparison instead of a job; list names them")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace (Perfetto opens it)")


def add_layouts(parser: ArgumentParser) -> None:
    """Add the words of `layouts`."""
    _add_job(parser)
    parser.add_argument("--devices", type=_count, required=True, metavar="N")
    parser.add_argument("--switches", action="store_true", help="each split with every switch, as recompute or offload")
    parser.add_argument("--pairs", action="store_true", help="which words compose with which, and why not the others")
    parser.add_argument("--why-not", metavar='"dp=2 ..."', help="say what one layout is refused for")
    parser.add_argument("--markdown", action="store_true", help="print the table for a document")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table")


def add_measure(parser: ArgumentParser) -> None:
    """Add the words of `measure`."""
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: where plan and simulate look for it")
    parser.add_argument("--ranks", type=_count, metavar="N", help="devices at once; default: all GPUs, or the cores")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")


def _count(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _price(text: str) -> float:
    """Read an amount of money."""
    number = _number(text)
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text} is no price; 2.5 is")
    return number


def _num_tokens(text: str) -> float:
    """Read 300B as 3e11."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    number = scale * _number(text[:-1] if scale > 1.0 else text)
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text} is no number of tokens; 2T, 300B or 1e12 are")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
