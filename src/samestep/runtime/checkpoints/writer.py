"""Writing a checkpoint in a thread of each rank, while the run goes on; the folder is complete, or it does not appear.

```
every rank    copy ─> thread: rank-NNNN.safetensors, fsync ─> "written" ──┐ in the store where the ranks met
rank 0                                                                    └─> manifest, fsync, rename, fsync; remove old ones
```
The ranks tell each other by keys of the store, and call no collective, which a thread could not do beside a step. A
rank that cannot write says so by the same key, and rank 0 removes the draft; one that dies is found by what started it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from samestep.building.pretrained_form import PretrainedForm
from samestep.errors import SamestepError
from samestep.output import durable_files
from samestep.runtime.checkpoints import manifests, pretrained_folder, tensor_file

_OF_PARTS = ("file", "tensors", "plain", "cuts", "digest")
_LONGEST_PAUSE_S = 0.2

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Retention:
    """The rule by which older checkpoints stay when a new one is there."""

    newest: int
    """The number of newest ones."""
    every: int = 0
    """Those whose step this divides stay for ever; with 0 none does."""

    def outdated(self, found: Sequence[Path]) -> list[Path]:
        """Return the checkpoints to remove, of all, oldest first."""
        return [path for path in found[: -self.newest] if not self.every or int(path.name[5:]) % self.every]


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a checkpoint: copies that nobody changes."""

    draft: Path
    final: Path
    rank: int
    world_size: int
    tensors: Mapping[str, Tensor]
    part: Mapping[str, Any]
    """What the manifest says of this rank's file."""
    head: Mapping[str, Any]
    """What it says beside the parts."""
    retention: Retention
    number: int
    """Rank 0's number of this checkpoint, of all that it has begun."""
    timeout_s: float

    def manifest(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the manifest, given the parts of all ranks."""
        frozen = {name for part in parts for name in part["frozen"]}
        return {
            **self.head,
            "frozen": {name: shape for name, shape in self.head["frozen"].items() if name in frozen},
            "parts": [{key: part[key] for key in _OF_PARTS} for part in parts if part["tensors"]],
            "ranks": [part["record"] for part in parts],
        }


def next_number() -> int:
    """Return a number that this process has not returned before."""
    return next(_numbers)


class _OthersError(Exception):
    """Another rank cannot write its share; that rank says why."""


@dataclass(slots=True)
class Writing:
    """A checkpoint that is being written."""

    share: Share
    form: PretrainedForm | None
    thread: threading.Thread | None = None
    reason: str = field(default="", init=False)
    """Why this rank cannot write."""

    @classmethod
    def begin(cls, share: Share, form: PretrainedForm | None) -> Writing:
        """Begin to write in a thread of this process."""
        writing = cls(share, form)
        writing.thread = threading.Thread(target=writing._write, name="checkpoint")
        writing.thread.start()
        return writing

    def wait(self) -> str:
        """Wait until this rank has done its share, and return why it could not; empty if it could."""
        if self.thread is not None:
            self.thread.join()
        return self.reason

    def _write(self) -> None:
        share = self.share
        try:
            try:
                file = f"rank-{share.rank:04d}.safetensors"
                digest = tensor_file.write(share.draft / file, share.tensors) if share.tensors else ""
                self._tell("written", {**share.part, "file": file, "digest": digest})
                if self.form is not None:
                    self._write_pretrained(self.form)
                if share.rank == 0:
                    self._complete()
            except OSError as error:
                self._fail(reason_of(error, share.draft))
            except SamestepError as error:
                self._fail(str(error))
            except _OthersError:
                pass
            except Exception as error:
                self._fail(f"{type(error).__name__}: {error}")
        finally:
            if share.rank == 0:
                with contextlib.suppress(OSError):
                    remove_left_overs(share.final.parent)

    def _fail(self, reason: str) -> None:
        self.reason = reason
        for word in ("written", "converted"):
            self._tell(word, None)

    def _write_pretrained(self, form: PretrainedForm) -> None:
        """Write this rank's files for transformers, from what all ranks have written."""
        share = self.share
        manifest = share.manifest(self._all("written"))
        out = share.draft / pretrained_folder.NAME
        pretrained_folder.write(form, share.draft, manifest, out, share=(share.rank, share.world_size))
        self._tell("converted", True)

    def _complete(self) -> None:
        """Write the manifest, give the folder its name and remove outdated ones, once every rank has written."""
        share = self.share
        parts = self._all("written")
        if self.form is not None:
            self._all("converted")
        manifests.write_manifest(share.draft, share.manifest(parts))
        durable_files.sync(share.draft)
        remove(share.final)
        durable_files.rename(share.draft, share.final)
        for old in share.retention.outdated(manifests.list_checkpoints(share.final.parent)):
            remove(old)
        for word, rank in itertools.product(("written", "converted"), range(share.world_size)):
            self._forget(word, rank)

    # -- telling the other ranks -------------------------------------------------------------------

    def _tell(self, word: str, value: Any) -> None:
        _store(self.share.world_size).set(self._key(word, self.share.rank), json.dumps(value))

    def _all(self, word: str) -> list[Any]:
        """Return what every rank tells by a word, in the order of ranks.

        Raises:
            _OthersError: one of them cannot write.
        """
        store, found, pause_s = _store(self.share.world_size), [], 0.002
        end = time.monotonic() + self.share.timeout_s
        for rank in range(self.share.world_size):
            while not store.check([self._key(word, rank)]):
                if time.monotonic() > end:
                    raise TimeoutError(f"rank {rank} has not written within {self.share.timeout_s:g} s")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            found.append(json.loads(store.get(self._key(word, rank))))
            if found[-1] is None:
                raise _OthersError
        return found

    def _forget(self, word: str, rank: int) -> None:
        _store(self.share.world_size).delete_key(self._key(word, rank))

    def _key(self, word: str, rank: int) -> str:
        return f"samestep/checkpoint/{self.share.number}/{word}/{rank}"


def remove_left_overs(folder: Path) -> None:
    """Remove the drafts, and the checkpoints on their way out, of a save that failed or whose process died."""
    for left_over in folder.glob(".step-*"):
        durable_files.remove_folder(left_over)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint; a process that dies meanwhile leaves no folder that looks complete."""
    if checkpoint.exists():
        going = checkpoint.with_name(f".{checkpoint.name}.removed")
        durable_files.rename(checkpoint, going)
        durable_files.remove_folder(going)


def reason_of(error: OSError, folder: Path) -> str:
    """Return why the file system refuses, and the file, as text."""
    return f"{error.strerror or error} ({error.filename or folder})"


_alone = HashStore()


def _store(world_size: int) -> Store:
    """Return the store where the ranks of this run met."""
    return _alone if world_size == 1 else dist.distributed_c10d._get_default_store()
