"""Writing a checkpoint in a thread of each rank, while the run goes on; the folder is complete, or it does not appear.

```
every rank    copy ─> thread: rank-NNNN.safetensors, fsync ─> "written" ──┐ in the store where the ranks met
rank 0                                                                    └─> manifest, fsync, rename, fsync; remove old ones
```
The ranks communicate by keys of the store, and call no collective, which a thread could not do during a step. A rank
that cannot write says so by the same key, and rank 0 removes the draft; one that dies is found by its parent or
launcher.

Each rank writes one file in the format of safetensors, piece by piece and hashed on the way; the functions at the top
name the pieces.

    8 bytes: length of the head | head: JSON, padded with blanks to 8 bytes | the tensors' bytes, one after another
    head: {NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}

safetensors' own writer gives no digest, so a second pass would have to read the file again. Its readers read these files.
Source: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from samestep.building.pretrained_form import PretrainedForm
from samestep.building.torch_seams import default_store
from samestep.errors import CheckpointError, SamestepError
from samestep.output import durable_files
from samestep.runtime.checkpoints import checkpoint_files, manifests
from samestep.runtime.prepared_run import PreparedRun
from samestep.runtime.weights.pieces import Piece
from samestep.runtime.weights.placement import part_index


def name_of(run: PreparedRun, piece: Piece) -> str:
    """Return the name of a weight in the files; a part of a weight sharded over tp or ep has a separate name."""
    return piece.name if piece.is_uncut else name_of_part(run, piece.name)


def name_of_part(run: PreparedRun, name: str) -> str:
    """Return the name in the files of the part of a weight that tp and ep leave this rank."""
    holding = run.assembly.weights.placements.holding(name)
    if not holding.sharded_over:
        return name
    return f"{name}@{part_index(holding, run.assembly.parallel.mesh)}of{holding.num_parts}"


def slices_of(run: PreparedRun, frozen: Sequence[Piece]) -> dict[str, list[Any]]:
    """Return dimension and intervals of each sharded weight's part that this rank writes, by name in the files."""
    pieces = (*run.updater.pieces, *frozen)
    names = {name: piece for piece in pieces if (name := name_of(run, piece)) != piece.name}
    placements = run.assembly.weights.placements
    parts = {name: placements.slice_of(names[name]) for name in sorted(names)}
    parts |= {
        part: placements.part(lost.name)
        for lost in run.assembly.weights.store.codes.residuals()
        if (part := name_of_part(run, lost.name)) != lost.name
    }
    return {name: [part.dim, [list(ends) for ends in part.intervals]] for name, part in parts.items()}


def weights_held_elsewhere(run: PreparedRun) -> set[str]:
    """Return the names of weights that another rank writes: the first of all ranks that hold the same part does."""
    step, mesh = run.program.step, run.assembly.parallel.mesh
    return {param.name for param in step.model.params if any(map(mesh.index, step.holding(param).copied_over))}


def encodes_first(run: PreparedRun, name: str) -> bool:
    """Return whether this rank is the first of those that encode the same contribution to a weight's gradient."""
    holding, contributions = run.assembly.weights.placements.holding(name), run.program.step.contributions
    within = (
        *holding.replicated_over,
        *holding.tied_over,
        *(contributions.inside if contributions is not None else ()),
    )
    return not any(map(run.assembly.parallel.mesh.index, within))


def index_of_contributions(run: PreparedRun) -> int:
    """Return the index of this rank among those between which contributions are encoded."""
    contributions = run.program.step.contributions
    return run.assembly.parallel.mesh.index(contributions.axis) if contributions is not None else 0


def copy_to_host(tensor: Tensor, *, is_new: bool = False) -> Tensor:
    """Return a copy on the host, or the tensor itself if it is there already and has no other holder."""
    there = tensor.detach().cpu()
    return (there if is_new else there.clone()).contiguous()


_WORDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors on the host to a new file, wait until it is on disk, and return its digest.

    Raises:
        CheckpointError: the format has no such dtype.
        OSError: the file cannot be written.
    """
    # Wide elements first, so that each tensor's bytes are aligned for its own dtype.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    head: dict[str, object] = {}
    at = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _WORDS:
            raise CheckpointError("export-form", f"{name} has dtype {tensor.dtype}, which no file of safetensors holds")
        head[name] = {
            "dtype": _WORDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little")
        yield text
        for name in names:
            if tensors[name].numel():
                yield tensors[name].contiguous().flatten().view(torch.uint8).numpy().data

    return durable_files.write_new(path, pieces())


_OF_PARTS = ("file", "tensors", "plain", "cuts", "digest")
_LONGEST_PAUSE_S = 0.2

numbers = itertools.count()
"""The numbers of the checkpoints that this process begins."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The rule by which older checkpoints stay when a new one is there."""

    newest: int
    """The number of newest ones."""
    every: int = 0
    """Those whose step this divides stay for ever; with 0 none does."""

    def outdated_checkpoints(self, paths: Sequence[Path]) -> list[Path]:
        """Return the checkpoints to remove, of all, oldest first."""
        return [path for path in paths[: -self.newest] if not self.every or int(path.name[5:]) % self.every]


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a checkpoint: copies that nobody changes."""

    draft: Path
    final: Path
    rank: int
    world_size: int
    tensors: Mapping[str, Tensor]
    part: Mapping[str, Any]
    """The manifest's entry for this rank's file."""
    head: Mapping[str, Any]
    """The manifest's entries other than the parts."""
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


class _OthersError(Exception):
    """Another rank cannot write its share; that rank says why."""


@dataclass(slots=True)
class Writing:
    """A checkpoint that is being written."""

    share: Share
    form: PretrainedForm | None
    store: Store
    """The store that the ranks of the run share; the thread may outlive the run's process group."""
    thread: threading.Thread | None = None
    reason: str = field(default="", init=False)
    """Why this rank cannot write."""

    @classmethod
    def begin(cls, share: Share, form: PretrainedForm | None) -> Writing:
        """Begin to write in a thread of this process."""
        writing = cls(share, form, _alone if share.world_size == 1 else default_store())
        writing.thread = threading.Thread(target=writing._write, name="checkpoint")
        writing.thread.start()
        return writing

    def wait(self) -> str:
        """Wait until this rank has written its share, and return why it could not; empty if it could."""
        if self.thread is not None:
            self.thread.join()
        return self.reason

    def _write(self) -> None:
        share = self.share
        try:
            try:
                file = f"rank-{share.rank:04d}.safetensors"
                digest = write(share.draft / file, share.tensors) if share.tensors else ""
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
        with contextlib.suppress(RuntimeError):  # the rank that serves the store has gone, and with it whom to tell
            for word in ("written", "converted"):
                self._tell(word, None)

    def _write_pretrained(self, form: PretrainedForm) -> None:
        """Write this rank's files for transformers, from the files of all ranks."""
        share = self.share
        manifest = share.manifest(self._all("written"))
        out = share.draft / checkpoint_files.NAME
        checkpoint_files.write(form, share.draft, manifest, out, share=(share.rank, share.world_size))
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
        for old in share.retention.outdated_checkpoints(manifests.list_checkpoints(share.final.parent)):
            remove(old)
        for word, rank in itertools.product(("written", "converted"), range(share.world_size)):
            self._forget(word, rank)

    # -- telling the other ranks -------------------------------------------------------------------

    def _tell(self, word: str, value: Any) -> None:
        self.store.set(self._key(word, self.share.rank), json.dumps(value))

    def _all(self, word: str) -> list[Any]:
        """Return every rank's value under a word, in the order of ranks.

        Raises:
            _OthersError: one of them cannot write.
        """
        values, pause_s = [], 0.002
        end = time.monotonic() + self.share.timeout_s
        for rank in range(self.share.world_size):
            while not self.store.check([self._key(word, rank)]):
                if time.monotonic() > end:
                    raise TimeoutError(f"rank {rank} has not written within {self.share.timeout_s:g} s")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            values.append(json.loads(self.store.get(self._key(word, rank))))
            if values[-1] is None:
                raise _OthersError
        return values

    def _forget(self, word: str, rank: int) -> None:
        self.store.delete_key(self._key(word, rank))

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
