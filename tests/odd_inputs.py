"""Odd and damaged inputs of every reader, drawn from a seed: `python -m tests.odd_inputs [--seconds 600] [--seed 0] [--count 5000]`.

    READERS["tokenizer"](folder, drawn) -> Odd       writes one input into a folder, damaged in one way, beside its unharmed twin
    verdict(odd)                                     reads both, and says what is wrong with what came of it

An input is read, and then as the library reads it that owns the form (json, tomllib, tokenizers, safetensors), or refused in one
line by one of our own errors, which names the file and the row or key that is harmed. The twin is never refused. What is drawn is
a function of the seed, the reader and a number, so each input that is printed can be made again. `make crashes` gives it ten minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import importlib.util
import io
import json
import random
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import torch

import samestep
from samestep import hardware
from samestep import job_files as jobs
from samestep.building.pretrained import pretrained_source
from samestep.datasets import open_tokenizer
from samestep.errors import SamestepError
from samestep.job import Job
from samestep.models import weight_files
from samestep.runtime.checkpoints import checkpoint, manifests
from samestep.runtime.run import Run
from tests import damage
from tests.damage import mutated
from tests.folders import saved
from tests.laboratory import job_of, make_run

HANGS_S = 60.0
"""The seconds after which a reader hangs: the process ends with the stacks of its threads."""
NAMED = 0.98
"""The least part of refusals that name file and row."""


@dataclass(frozen=True)
class Odd:
    """A damaged input."""

    what: str
    """What was done to it, and to which file."""
    read: Callable[[], object]
    """Reads it with samestep."""
    right: Callable[[], object] | None
    """Reads it with the library that owns the form; None where there is no such, or what is read is not compared."""
    twin: Callable[[], object]
    """Reads the unharmed input with samestep."""
    names: tuple[str, ...]
    """Of these the refusal names one: the file, or the folder that it belongs to."""
    keys: tuple[str, ...] = ()
    """Of these too: the harmed row or key, in the words of a refusal; empty where the whole file is harmed."""


@dataclass(frozen=True)
class Verdict:
    """What came of an input."""

    fault: str = ""
    """A traceback in one line, a wrong value, a refusal of the twin, or a refusal of several lines; empty where all is well."""
    refusal: str = ""
    is_named: bool = True
    """Whether the refusal, if it is one, names file and row."""


def verdict(odd: Odd) -> Verdict:
    """Read an input and its twin."""
    try:
        odd.twin()
    except Exception as error:
        return Verdict(f"the unharmed twin fails: {type(error).__name__}: {error}")
    try:
        found = odd.read()
    except SamestepError as error:
        text = str(error)
        lines = text.splitlines()  # one for each mistake, where a file has several
        if not lines or (len(lines) > 1 and not all(any(one in line for one in odd.names) for line in lines)):
            return Verdict(f"not one line for each mistake: {text!r}", text)
        named = any(one in text for one in odd.names) and (not odd.keys or any(one in text for one in odd.keys))
        return Verdict("", text, named)
    except BaseException as error:  # a panic of tokenizers is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return Verdict(f"{type(error).__name__}: {str(error)[:200]}")
    if odd.right is None:
        return Verdict()
    try:
        right = odd.right()
    except Exception as error:
        return Verdict(f"read, though its own library fails: {type(error).__name__}: {str(error)[:100]}")
    return Verdict("" if found == right else f"read {str(found)[:80]!r} for {str(right)[:80]!r}")


# -- bytes and values ------------------------------------------------------------------------------


def harmed(content: bytes, drawn: random.Random) -> tuple[bytes, str]:
    """Return the bytes of a file of text with one harm, as of a bad disk or a careless copy, and what it is."""
    kind = drawn.choice(("flip", "cut", "empty", "zeros", "append", "bom", "utf-16", "not utf-8", "nested", "html"))
    at = drawn.randrange(max(1, len(content)))
    match kind:
        case "flip":
            found = bytearray(content)
            found[at] ^= 1 << drawn.randrange(8)
            return bytes(found), kind
        case "cut":
            return content[:at], kind
        case "zeros":
            return content[:at] + bytes(5) + content[at:], kind
        case "append":
            return content + drawn.choice((b"}", b"\x00", b"]", b"# more", b"\n\n", b"{}")), kind
        case "bom":
            return b"\xef\xbb\xbf" + content, kind
        case "utf-16":
            return content.decode().encode("utf-16"), kind
        case "not utf-8":
            return content[:at] + drawn.choice((b"\xff", b"\xc3(", b"\xed\xa0\x80")) + content[at:], kind
        case "nested":
            return b"[" * 100_000 + b"]" * 100_000, kind
        case "html":
            return b"<html>404</html>", kind
    return b"", "empty"


def _written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(one) for key, one in value.items() if one is not None}
    return [without_none(one) for one in value if one is not None] if isinstance(value, list) else value


def _harmed_table(
    table: dict[str, Any], folder: Path, name: str, drawn: random.Random
) -> tuple[Path, str, tuple[str, ...]]:
    """Write a TOML table with odd bytes or odd values; return its path, what was done, and the keys that are harmed."""
    sound = tomli_w.dumps(without_none(table)).encode()
    if drawn.random() < 0.4:
        content, what = harmed(sound, drawn)
        return _written(folder, name, content), what, ()
    changed, what = mutated(table, drawn)
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        sound = tomli_w.dumps(without_none(changed)).encode("utf-8", "surrogatepass")
    return _written(folder, name, sound), what, tuple(_keys_in(what))


def _keys_in(what: str) -> Iterator[str]:
    """Yield the keys that `mutated` says it has changed, and those above them."""
    for place in what.split(", ["):
        above, _, last = place.partition("]/")
        yield from (word.strip("[]'\" ") for word in above.split(","))
        yield last


# -- jobs and profiles -----------------------------------------------------------------------------

_JOB: dict[str, Any] = json.loads(Job(model={"source": "preset:gpt3-125m"}).model_dump_json())
_PROFILE = tomllib.loads((Path(samestep.__file__).parent / "profiles" / "cpu-laptop.toml").read_text())


def job_file(folder: Path, drawn: random.Random) -> Odd:
    """Draw a job file."""
    path, what, keys = _harmed_table(_JOB, folder, "odd-job.toml", drawn)
    twin = _written(folder, "job.toml", tomli_w.dumps(without_none(_JOB)).encode())
    return Odd(
        f"{what} in {path.name}",
        lambda: jobs.load(path).to_toml(),
        lambda: Job(**tomllib.loads(path.read_text("utf-8-sig"))).to_toml(),
        lambda: jobs.load(twin),
        (path.name,),
        keys,
    )


def profile(folder: Path, drawn: random.Random) -> Odd:
    """Draw a hardware profile."""
    path, what, keys = _harmed_table(_PROFILE, folder, "odd-profile.toml", drawn)
    twin = _written(folder, "profile.toml", tomli_w.dumps(_PROFILE).encode())
    return Odd(
        f"{what} in {path.name}",
        lambda: hardware.load(path).devices_per_node,
        lambda: tomllib.loads(path.read_text("utf-8-sig"))["devices_per_node"],
        lambda: hardware.load(twin),
        (path.name,),
        keys,
    )


# -- folders of models and tokenizers --------------------------------------------------------------


@functools.cache
def _model(folder: Path) -> Path:
    return saved(folder / "model", "llama")


def _copied(sound: Path, folder: Path) -> Path:
    made = folder / "odd-model"
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(sound, made)
    return made


def built(folder: Path) -> list[str]:
    source = pretrained_source(folder, {}, "causal")
    with torch.device("meta"):
        module = source.build()
    source.stored(module, {name: name for name in module.state_dict()})
    return sorted(module.state_dict())


def _harm_json(path: Path, drawn: random.Random) -> str:
    """Harm the bytes of a file of JSON, or a value in it; return what was done."""
    if drawn.random() < 0.5:
        content, what = harmed(path.read_bytes(), drawn)
    else:
        changed, what = mutated(json.loads(path.read_text()), drawn)
        content = json.dumps(changed).encode()
    path.write_bytes(content)
    return what


def model_folder(folder: Path, drawn: random.Random) -> Odd:
    """Draw a folder of a model whose configuration or index is harmed."""
    sound = _model(folder.parent)
    made = _copied(sound, folder)
    name = drawn.choice((weight_files.CONFIG, weight_files.INDEX))
    path = made / name
    what = _harm_json(path, drawn)
    return Odd(f"{what} in {name}", lambda: built(made), None, lambda: built(sound), (made.name, name))


def weights(folder: Path, drawn: random.Random) -> Odd:
    """Draw a folder of a model of which a file of weights is harmed."""
    sound = _model(folder.parent)
    made = _copied(sound, folder)
    path = drawn.choice(sorted(made.glob("*.safetensors")))
    content = bytearray(path.read_bytes())
    kind = drawn.choice(("head", "mutated", "mutated", "cut", "length", "empty", "missing", "text"))
    size = int.from_bytes(content[:8], "little")
    match kind:
        case "head":
            content[8 + drawn.randrange(size)] ^= 1 << drawn.randrange(8)
        case "mutated":
            changed, kind = mutated(json.loads(content[8 : 8 + size]), drawn)
            text = json.dumps(changed).encode()
            content = bytearray(len(text).to_bytes(8, "little") + text + content[8 + size :])
        case "cut":
            del content[drawn.randrange(len(content)) :]
        case "length":
            content[:8] = drawn.choice([0, 2**40, 2**63, len(content)]).to_bytes(8, "little")
        case "empty":
            content.clear()
        case "text":
            content = bytearray(b"version https://git-lfs.github.com/spec/v1\n")
    path.unlink()
    if kind != "missing":
        path.write_bytes(content)
    return Odd(f"{kind} in {path.name}", lambda: built(made), None, lambda: built(sound), (made.name, path.name))


@functools.cache
def _tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(
        ["to be or not to be"] * 3, trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "<eos>"])
    )
    (folder / "tokenizer").mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer" / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / "tokenizer"


_TEXT = "not to be <eos> or so"


def _encoded(folder: Path) -> list[int]:
    tokenizer = open_tokenizer(Job(data={"source": "text:none.txt", "tokenizer": str(folder)}))
    return [int(one) for one in tokenizer.encode(_TEXT)]


def tokenizer_folder(folder: Path, drawn: random.Random) -> Odd:
    """Draw a folder of a tokenizer of which a file is harmed."""
    sound = _tokenizer(folder.parent)
    made = folder / "odd-tokenizer"
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(sound, made)
    path = made / drawn.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json"))
    what = _harm_json(path, drawn)

    def right() -> list[int]:
        from tokenizers import Tokenizer

        return list(
            Tokenizer.from_str((made / "tokenizer.json").read_text("utf-8")).encode(_TEXT, add_special_tokens=False).ids
        )

    compared = right if path.name == "tokenizer.json" else None
    return Odd(
        f"{what} in {path.name}", lambda: _encoded(made), compared, lambda: _encoded(sound), (made.name, path.name)
    )


# -- checkpoints -----------------------------------------------------------------------------------


@functools.cache
def _run(folder: Path) -> tuple[Run, Path]:
    from samestep.datasets import batches
    from tests.models import Tokens

    job = job_of("float32", 4, optimizer={"name": "adamw", "lr": 1e-2, "options": {}}, train={"watch_every": 0})
    run = make_run(0, 1, "plain", "dp=1", job)
    for batch in batches(Tokens(), job):
        run.step(batch)
        checkpoint.save(run, folder / "checkpoints", keep=2)
        if run.steps_taken == 2:
            break
    return run, folder / "checkpoints"


def stored(folder: Path, drawn: random.Random) -> Odd:
    """Draw a checkpoint that is harmed."""
    run, sound = _run(folder.parent)
    made = folder / "checkpoints"
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(sound, made)
    newest = made / "step-000002"
    kind = drawn.choice((*damage.DAMAGES, *["mutated"] * 9))
    if kind == "mutated":
        manifest, kind = mutated(manifests.read_manifest(newest), drawn)
        (newest / manifests.NAME).unlink()
        manifests.write_manifest(newest, manifest)
    else:
        damage.damaged(newest, kind, drawn)

    def read() -> int:
        checkpoint.load(run, newest)
        return run.steps_taken

    def right() -> int:
        return int(manifests.read_manifest(newest)["step"])

    twin = functools.partial(checkpoint.load, run, sound / "step-000002")
    return Odd(f"{kind} in {newest.name}", read, right, twin, (newest.name,))


# -- rows, images and tokens -----------------------------------------------------------------------


def _rows(kind: str, folder: Path, drawn: random.Random) -> Odd:
    """Draw a file of rows: what is wrong with what came of it is said by its own module."""
    rows = importlib.import_module("tests.damaged_rows")
    one = next(rows.READERS[kind](folder, drawn.randrange(2**32), 1))

    def twin() -> None:
        assert rows.is_read(one.twin, one.tokenizer), "it is refused"

    return Odd(
        f"{one.kind} at row {one.row} of {one.path.name}", lambda: rows.judged(one), lambda: "", twin, (one.path.name,)
    )


def _files(kind: str, folder: Path, drawn: random.Random) -> Odd:
    """Draw a folder of images or tokens."""
    files = importlib.import_module("tests.damaged_data")
    damages = {"images": "IMAGE_DAMAGES", "tokens": "TOKEN_DAMAGES"}
    shutil.rmtree(folder, ignore_errors=True)
    sound = getattr(files, kind)(folder / "sound", drawn)
    case = getattr(files, kind)(folder / "odd", drawn, drawn.choice(getattr(files, damages[kind])))
    return Odd(
        f"{case.damage} in {case.file.name}",
        lambda: files.outcome(case) in ("read", "refused"),
        lambda: True,
        lambda: files.outcome(sound),
        (case.file.name,),
    )


JUDGED_BY_THEMSELVES: dict[str, tuple[str, Callable[[str, Path, random.Random], Odd]]] = {
    **dict.fromkeys(("jsonl", "chat", "parquet", "text"), ("tests.damaged_rows", _rows)),
    **dict.fromkeys(("images", "tokens"), ("tests.damaged_data", _files)),
}
"""By reader: the module that damages its files, and the function that draws from it."""

Reader = Callable[[Path, random.Random], Odd]
READERS: dict[str, Reader] = {
    "job": job_file,
    "profile": profile,
    "model": model_folder,
    "weights": weights,
    "tokenizer": tokenizer_folder,
    "checkpoint": stored,
    **{
        kind: functools.partial(draw, kind)
        for kind, (module, draw) in JUDGED_BY_THEMSELVES.items()
        if importlib.util.find_spec(module) is not None
    },
}


# -- the command -----------------------------------------------------------------------------------


@dataclass
class Sums:
    """What came of all inputs of a reader."""

    given: int = 0
    refused: int = 0
    named: int = 0
    faults: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)

    def add(self, name: str, odd: Odd, found: Verdict) -> None:
        """Count one more."""
        self.given += 1
        self.refused += bool(found.refusal)
        self.named += bool(found.refusal) and found.is_named
        if found.fault:
            self.faults.append(f"{name}, {odd.what}: {found.fault}")
        elif not found.is_named:
            self.unnamed.append(f"{name}, {odd.what}: {found.refusal}")

    @property
    def is_good(self) -> bool:
        """Whether nothing failed, and nearly all refusals name file and row."""
        return not self.faults and self.named >= NAMED * self.refused


def swept(folder: Path, seed: int, count: int, seconds: float, readers: list[str], *, limits: bool) -> dict[str, Sums]:
    """Try inputs of all readers in turn, `count` in all, for so many seconds at most."""
    found = {reader: Sums() for reader in readers}
    end = time.monotonic() + seconds
    for number in range(count):
        if time.monotonic() > end:
            break
        reader = readers[number % len(readers)]
        name = f"{seed} {reader} {found[reader].given}"
        own = folder / reader
        own.mkdir(exist_ok=True)
        if limits:
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
        with contextlib.redirect_stderr(io.StringIO()):
            odd = READERS[reader](own, random.Random(name))
            seen = verdict(odd)
        if limits:
            faulthandler.cancel_dump_traceback_later()
        found[reader].add(name, odd, seen)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--readers", nargs="*", default=list(READERS), choices=READERS, metavar="READER")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="samestep-odd-") as folder:
        found = swept(Path(folder), given.seed, given.count, given.seconds, given.readers, limits=True)
    for reader, sums in found.items():
        print(
            f"{reader}: {sums.given} given, {sums.refused} refused, {sums.named} of them with file and row, {len(sums.faults)} faults"
        )
        for line in [*sums.faults, *sums.unnamed][:20]:
            print(f"  {line[:400]}")
    return int(not all(sums.is_good for sums in found.values()))


if __name__ == "__main__":
    sys.exit(main())
