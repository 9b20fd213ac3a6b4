"""Every error that samestep raises; the text says what was given, the rule, and what would work.

```
SamestepError (Exception)
├── InputError (ValueError)         what was given cannot run; exit status 2
│   ├── JobError                    the job: a key, a type, a value
│   ├── LayoutError                 the layout: a word, a product of degrees, a rule of a strategy
│   ├── ModelError                  the model: cannot be built, traced, initialised or cut
│   ├── DataError                   the data: missing, too short, badly formed
│   ├── UnprovenError               nothing shows that the layout computes what one device does; `run.allow` may waive it
│   ├── CheckpointError             the checkpoint: missing, of another job, damaged
│   └── RecordError                 the record of a run's time: none, damaged, of another version
└── RunError (RuntimeError)         the run failed on the way, though what was given can run; exit status 1
    ├── SaveError                   a checkpoint cannot be written: no space, no permission
    ├── WorkerError                 a worker process died: its rank and its last output
    ├── NonFiniteError              the loss or a gradient is not finite, and the job says stop
    ├── SpikeError                  losses stay far above those before, step after step, and the job says skip
    ├── DriftError                  ranks that must hold the same do not
    ├── RepeatError                 a part of a step, done once more, gives something else
    └── OutOfMemoryError            memory ran out, on a device or on the host
```
Each is raised with a code, which stays when the text is reworded, and the text: `raise LayoutError("tp-indivisible", f"tp={tp} ...")`.
A mistake of none of these classes, such as a file that cannot be written, is an `InputError` itself. A broken invariant
of our own code is an `assert`, never one of these.
"""

from __future__ import annotations

import difflib
import os
import re
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


class SamestepError(Exception):
    """Any error that samestep raises on purpose."""

    in_rank: tuple[str, ...] = ()
    """Of an error of a worker, its lines of the user's code, as a traceback shows them."""

    def __init__(self, code: str, text: str) -> None:
        """Set the code, one of docs/reference/errors.md, and the text; if no program catches an error, only its user's lines are printed."""
        super().__init__(code, text)
        self.code = code
        hook = sys.excepthook
        # The hook of torch.distributed prefixes each line with the rank.
        if hook is sys.__excepthook__ or str(hook.__module__).startswith("torch.distributed."):
            sys.excepthook = partial(_print_users_lines, hook)

    def __str__(self) -> str:
        return str(self.args[1])

    @property
    def with_code(self) -> str:
        """The text, with the code in brackets at the end of its first line."""
        first, end, rest = str(self).partition("\n")
        return f"{first} [{self.code}]{end}{rest}"

    @property
    def remedy(self) -> str:
        """The last clause of the text's first line, which specifies what to do."""
        line = str(self).partition("\n")[0]
        return next((line.rpartition(mark)[2] for mark in (". ", "; ", ": ") if mark in line), line)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows of this error."""
        return users_lines(self)


class InputError(SamestepError, ValueError):
    """A mistake in the input of samestep; the text names a fix."""


class JobError(InputError):
    """The job cannot be understood or cannot be run."""


class LayoutError(InputError):
    """The layout cannot be understood, or a strategy rejects it."""


class ModelError(InputError):
    """The model cannot be built, traced, initialised or cut."""


class DataError(InputError):
    """The data is missing, too short or badly formed."""


class UnprovenError(InputError):
    """Nothing shows that the layout equals one device; the text ends with the name that skips the check."""

    def __init__(self, code: str, reason: str, waiver: str = "") -> None:
        """Set the code, the reason, and the waiver, a word of `job_tables.Waiver`, if there is one."""
        super().__init__(code, f'{reason}; run.allow = ["{waiver}"] lets it run unproven' if waiver else reason)
        self.reason, self.waiver = reason, waiver

    def __reduce__(self) -> tuple[type[UnprovenError], tuple[str, str, str]]:
        return UnprovenError, (self.code, self.reason, self.waiver)


class CheckpointError(InputError):
    """The checkpoint is missing, belongs to another job, or is damaged."""


class RecordError(InputError):
    """A record or trace of a run's steps that `explain` cannot read."""


class RunError(SamestepError, RuntimeError):
    """A run failed although its input can run; the text says where and why."""


class SaveError(RunError):
    """A checkpoint cannot be written; the text says why, and which one is the newest."""


class WorkerError(RunError):
    """A worker process died; the text gives its rank and its last output."""


class NonFiniteError(RunError):
    """The loss or a gradient is not finite; the text names the first module at fault."""


class SpikeError(RunError):
    """The losses of too many steps in succession are spikes; the text gives the last one and the bound."""


class DriftError(RunError):
    """Ranks that must hold equal values do not; the text names the tensor and the rank."""


class RepeatError(RunError):
    """A part of a step, done once more, gives something else; the text names the sample or the weight, and the cause."""


class OutOfMemoryError(RunError):
    """Out of memory; the text has the largest parts, the prediction, and a layout that needs less."""


def to_words(error: SamestepError) -> tuple[str, tuple[str, ...]]:
    """Return the name of an error's class, one of those here, and its arguments, as words that can be sent."""
    kind = next(base for base in type(error).__mro__ if base.__module__ == __name__)
    text = (error.reason, error.waiver) if isinstance(error, UnprovenError) else (str(error),)
    return kind.__name__, (error.code, *text)


def of_words(name: str, texts: Iterable[str]) -> SamestepError:
    """Return the error of which these are the words; a name of no class here makes a `RunError`."""
    kind = globals().get(name)
    return kind(*texts) if isinstance(kind, type) and issubclass(kind, SamestepError) else RunError(*texts)


def _print_users_lines(
    hook: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught error: by `hook`, or of an error of samestep the lines of the user's code."""
    if isinstance(error, SamestepError):
        most = int(os.environ.get("RANK", "0") != "0")  # under a launcher the other ranks print the last line alone
        print("\n".join(users_lines(error, most)), file=sys.stderr)
    else:
        hook(kind, error, trace)


def users_lines(error: SamestepError, most: int = 0) -> list[str]:
    """Return the text that is printed for an uncaught error: the last lines of the user's code (0: all), and the message with its code."""
    message = f"{__name__}.{to_words(error)[0]}: {error.with_code}"
    return ["Traceback (most recent call last):", *users_frames(error, most), *error.in_rank, *message.splitlines()]


def users_frames(error: SamestepError, most: int = 0) -> list[str]:
    """Return the last lines of the user's code in the traceback of an error (0: all), as a traceback shows them."""
    packages = (str(Path(__file__).parent), *site.getsitepackages(), "<frozen runpy>")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(packages)]
    return "".join(traceback.format_list(frames[-most:])).splitlines()


def short_repr(value: object) -> str:
    """Return a value as an error shows it: of a long one the beginning."""
    try:
        text = repr(value)
        text = " ".join(text.split()) if "\n" in text else text
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or the name of its class where it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


_REMOVED = {
    'compression = "fp16"': 'compression = "bf16"',
    'compression = "int4"': 'compression = "int8"',
    'compression = "topk"': 'compression = "int8" or "powersgd"',
    'compile = "model"': 'compile = "blocks"',
    'compile_mode = "reduce-overhead"': 'compile_mode = "default"',
    'compile_mode = "max-autotune"': 'compile_mode = "max-autotune-no-cudagraphs"',
    'optimizer_states = "bf16"': 'optimizer_states = "8bit"',
    "exchange_parts": "exchange_every, which exchanges all weights",
    "exchange_delay": "exchange_every, which exchanges all weights after one step",
    "exchange_mix": "exchange_every, which exchanges all weights after one step",
    "record_kernels": "run.profile, which writes a trace of the kernels",
}
"""Words that jobs of earlier versions may have, and what to use in their place."""


_ASKS_FOR_NOTHING = {"exchange_parts": 1, "exchange_delay": 0, "exchange_mix": 0.5, "record_kernels": False}
"""Keys in jobs of earlier versions, with the values that ask for nothing."""


def without_removed(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a table without those of earlier versions that ask for nothing, which resolved jobs in old run folders have."""
    return {
        key: value for key, value in keys.items() if key not in _ASKS_FOR_NOTHING or _ASKS_FOR_NOTHING[key] != value
    }


def mistakes_in(error: ValidationError, source: Callable[[str], str], table: type[BaseModel]) -> tuple[str, str]:
    """Return the code of the first mistake in nested tables, and all mistakes, one a line: the origin, the key, what was given and what would be right."""
    lines, codes = [], []
    for mistake in error.errors(include_url=False):
        path = [str(part) for part in mistake["loc"]]
        key = ".".join(path)
        word = f'{path[-1]} = "{mistake["input"]}"' if path and isinstance(mistake["input"], str) else ""
        if (instead := _REMOVED.get(word) or _REMOVED.get(path[-1] if path else "")) is not None:
            code, text = "job-value-removed", f"{word or path[-1]} was removed in this version; use {instead}"
        elif mistake["type"] == "extra_forbidden":
            known = _keys_of(path[:-1], table)
            meant = next(keys_named(path[-1], table), "") or word_of_others(path[-1])
            hint = f": use {'the layout ' * is_layout(meant)}{meant}" if meant else did_you_mean(path[-1], known)
            code, text = "job-key-unknown", f"unknown key{hint}; the keys here are {', '.join(known)}"
        elif mistake["type"] == "value_error":
            code, text = mistake["ctx"]["error"].code, str(mistake["ctx"]["error"])
        else:
            code, text = (
                "job-value",
                f"{mistake['msg'][0].lower()}{mistake['msg'][1:].replace('valid tuple', 'list')}, got {short_repr(mistake['input'])}",
            )
        codes.append(code)
        lines.append(f"{source(key)}: {key}: {text}" if key else f"{source(key)}: {text}")
    return codes[0], "\n".join(lines)


def keys_named(name: str, root: type[BaseModel]) -> Iterator[str]:
    """Yield the keys of the tables of a job, such as `optimizer.lr`, that have a name."""
    return (f"{field}.{name}" for field in root.model_fields if name in _keys_of([field], root))


def _keys_of(path: Sequence[str], root: type[BaseModel]) -> list[str]:
    """Return the names of the keys of the table at `path`."""
    table: Any = root
    for part in (part for part in path if not part.isdecimal()):  # an entry of an array of tables
        field = table.model_fields.get(part)
        kinds = types_in(field.annotation) if field else ()
        table = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if not (isinstance(table, type) and issubclass(table, BaseModel)):
            return []
    return list(table.model_fields)


def types_in(kind: Any) -> Iterator[Any]:
    """Yield a type and, recursively, its type arguments."""
    yield kind
    for part in get_args(kind):
        yield from types_in(part)


def module_name(path: str) -> str:
    """Return the path of a module for a text: in quotes where it would read as a number, as `0.1` does."""
    return f"'{path}'" if path and path.replace(".", "").isdecimal() else path


_WORDS_OF_OTHERS = {
    r"(?:dp|data_parallel)_(shard|replicate)_\w+": r"dp_\1=N",
    r"([dtpce])p_(?:size|degree)|([dtpce])(?:ata|ensor|ipeline|ontext|xpert)_(?:model_)?parallel\w*": r"\1\2p=N",
    r"ddp|no_shard|world_size|(?:n_?|num_)?(?:gpus|devices|ranks|processes)|nproc\w*|num_workers_per_node": "dp=N",
    r"fsdp\w*|full_shard|sharding_strategy|reshard_after_forward|deepspeed\w*": "dp=N zero=3",
    r"(dp|tp|pp|cp|ep|zero|microbatch)": r"\1=N",
    r"hsdp|hybrid_shard": "dp_replicate=N dp_shard=N zero=3",
    r"zero_?(?:stage_?)?([0-3])": r"zero=\1",
    r"zero_stage|zero_optimization|stage|shard_grad_op|(?:use_)?distributed_optimizer": "zero=1, zero=2 or zero=3",
    r"mp|mp_size": "tp=N",
    r"sp|sp_(?:size|degree)|sequence_parallel_(?:size|degree)": "tp=N sequence_parallel, or cp=N for Ulysses and rings",
    r"(ulysses|ring|usp)(?:_\w+)?": r"cp=N cp_method=\1",
    r"cp_comm_type|context_parallel_\w+": "cp_method=ulysses, cp_method=ring or cp_method=usp",
    r"micro_?batch_?(?:size)?|mbs|per_(?:device|gpu)_\w*batch_size": "microbatch=N",
    r"(?:grad\w*_)?accum\w*|gas|(?:n_|num_)?micro_?batches|chunks": "microbatch=N, the samples that a rank computes at once",
    r"(?:activation_|gradient_)?checkpointing|activation_checkpoint|ac": "recompute=full",
    r"cpu_offload\w*|offload_(?:optimizer|params?)\w*": "offload",
    r"vpp|virtual_pipeline\w*|num_layers_per_virtual\w*": "schedule=interleaved virtual_stages=N",
    r"bf16|bfloat16|fp16|float16|half|amp|mixed_precision|precision|(?:torch_)?dtype": "numerics.precision",
    r"(?:global_|train_)?batch_?size|gbs": "train.global_batch",
    r"learning_rate|(?:base|max|peak)_lr": "optimizer.lr",
    r"(?:max_|num_|n_)?(?:train_)?(?:steps|iters|iterations|epochs)": "train.steps",
    r"(?:max_)?grad(?:ient)?_(?:norm|clip\w*)|clip_grad\w*": "optimizer.clip_norm",
    r"warmup\w*|num_warmup_steps": "schedule.warmup_steps",
    r"(?:lr_)?scheduler(?:_type)?|lr_schedule": "schedule.name",
    r"optim|optimizer": "optimizer.name",
    r"model|model_(?:name|path)\w*|pretrained\w*": "model.source",
    r"data|dataset\w*|data_(?:path|dir)|train_file": "data.source",
    r"(?:max_)?seq(?:uence)?_?len\w*|max_length|(?:block|context)_(?:size|length)": "data.sequence_length",
    r"save_(?:steps|interval|every)": "checkpoint.every",
    r"save_total_limit": "checkpoint.keep",
    r"eval_(?:steps|interval|every)|val_check_interval": "train.evaluate_every",
    r"report_to|log_with|logger": "run.report",
    r"logging_steps|log_interval": "run.log_every",
    r"torch_compile|compile": "run.compile",
    r"(?:dataloader_)?num_workers": "run.data_workers",
    r"output(?:_dir)?|out_dir|save_dir|default_root_dir": "--out",
    r"resume\w+|load_checkpoint": "--resume",
    r"rdzv\w*|master_(?:addr|port)": "--rendezvous",
    r"nnodes|num_nodes|num_machines": "--nodes",
}
"""Names that other frameworks have for an option of a layout, a key of a job or a flag of `train`, and what to use here."""


def word_of_others(word: str) -> str:
    """Return the option of a layout, the key of a job or the flag that other frameworks call by this word; nothing if none does."""
    word = word.lstrip("-").lower().replace("-", "_")
    matches = ((re.fullmatch(pattern, word), name) for pattern, name in _WORDS_OF_OTHERS.items())
    return next((match.expand(name) for match, name in matches if match), "")


def is_layout(name: str) -> bool:
    """Return whether a name of `word_of_others` is of a layout, and neither a key nor a flag."""
    return "." not in name and not name.startswith("--")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known word nearest to `word`, or nothing when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


class failures_of:  # noqa: N801  # a context, entered in every step: a generator takes twice as many calls
    """Turn an exception of the user's code into an error that says what failed, how, and in which line of that code.

    Raises:
        error: the code in the context raised an exception that is none of ours.
    """

    __slots__ = ("_error", "_what")

    def __init__(self, what: str, error: type[InputError]) -> None:
        """Name what the code does, and the class of the error."""
        self._what, self._error = what, error

    def __enter__(self) -> None:
        """Enter the context."""

    def __exit__(self, kind: type[BaseException] | None, failed: BaseException | None, *_: object) -> None:
        """Raise the error where the code has raised an exception that is none of ours."""
        if not isinstance(failed, Exception) or isinstance(failed, SamestepError | MemoryError):
            return
        text = " ".join(str(failed).split()) or "no text"
        raise self._error(
            "code-fails", f"{self._what} fails: {type(failed).__name__}: {text[:300]}{line_of(failed)}"
        ) from failed


def line_of(failed: Exception | None = None) -> str:
    """Return text with the innermost line of an exception, or of the stack, that is neither ours nor of an installed library; empty if none."""
    stack = traceback.walk_tb(failed.__traceback__) if failed else [*traceback.walk_stack(sys._getframe(1))][::-1]
    frames = traceback.StackSummary.extract(stack, lookup_lines=False)
    libraries = (str(Path(__file__).parent), sysconfig.get_paths()["stdlib"], *site.getsitepackages())
    own = [frame for frame in frames if not frame.filename.startswith((*libraries, "<"))]
    if not own:
        return ""
    path = Path(own[-1].filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f" ({shown}:{own[-1].lineno})"
