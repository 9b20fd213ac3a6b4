"""The verbs `sample`, `evaluate` and `export`: text, validation loss and weights of the model in a checkpoint, in one process without a run.

A run itself samples text too, one token at a time, before and after its training. `export` writes a folder for transformers, peft or torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from samestep import calls, wings
from samestep.building.families import POSITIONS_FIELD, VOCABULARY_FIELD, quiet, setting
from samestep.building.initial_values import Blueprint, fill
from samestep.building.model import blueprint_of
from samestep.building.model_changes import lora
from samestep.building.predictions import prediction_of
from samestep.building.pretrained_form import Merged, PretrainedForm, is_of_transformers
from samestep.datasets import open_tokenizer
from samestep.errors import CheckpointError, DataError, JobError, ModelError
from samestep.job import OF_SEVERAL, Job
from samestep.job_tables import Precision
from samestep.layout import Layout
from samestep.models.weight_files import ONE_FILE
from samestep.output import durable_files
from samestep.runtime.checkpoints import checkpoint, checkpoint_files, manifests, torch_checkpoint
from samestep.runtime.checkpoints.checkpoint_files import OpenCheckpoint, cast_to
from samestep.runtime.processes.join import RankInfo, resolve_device
from samestep.runtime.run import Run
from samestep.training import foreign_code, run_folder
from samestep.training.workload import Workload, describe_losses, held_out_losses


def sample_text(run: Run, prompt: str, num_tokens: int, temperature: float) -> str | None:
    """Sample `num_tokens` tokens after `prompt`; every call draws the same numbers.

    Returns:
        The text, prompt included; None where the model gives no logits [batch, sequence, vocabulary].
    """
    tokenizer = open_tokenizer(run.job)
    tokens = tokenizer.encode(prompt) or [tokenizer.end_id or 0]
    sampled = sample_tokens(run, tokens, num_tokens, temperature, run.job.train.seed)
    return None if sampled is None else tokenizer.decode(tokens + sampled)


def sample_tokens(
    run: Run, prompt_tokens: list[int], num_tokens: int, temperature: float, seed: int
) -> list[int] | None:
    """Sample `num_tokens` tokens after those of a prompt; every call with one seed draws the same numbers.

    Where no rank holds all weights, the call is collective over the world: every rank must make it, since the forward
    gathers weights and passes activations; if one rank does not, the others wait for it.

    Returns:
        The sampled tokens; None where the model gives no logits [batch, sequence, vocabulary].
    """
    tokens, most = list(prompt_tokens), open_tokenizer(run.job).vocab_size
    generator = torch.Generator().manual_seed(seed)
    window = run.job.data.sequence_length
    # Sequence parallelism divides the tokens evenly among the ranks of tp. What fills up stands behind the last token,
    # where no position of a causal model sees it.
    multiple = run.layout.tp if run.layout.sequence_parallel else 1
    for _ in range(num_tokens):
        seen = tokens[-window:]
        filled = seen + seen[-1:] * (-len(seen) % multiple)
        outputs = run.outputs({"input_ids": torch.tensor([filled])})
        try:
            batch_logits = prediction_of(outputs)
        except JobError:
            return None
        # Without labels, some models return the logits of the last token alone.
        if batch_logits.dim() != 3 or batch_logits.shape[1] not in {len(filled), 1 if filled == seen else len(filled)}:
            return None
        # A model may have more embeddings than the tokenizer has tokens: those are never sampled.
        logits = batch_logits[0, min(len(seen), batch_logits.shape[1]) - 1, :most].double().cpu()
        if temperature == 0:
            tokens.append(int(logits.argmax()))
            continue
        chances = torch.softmax(logits / temperature, dim=-1).nan_to_num(1.0)
        tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    return tokens[len(prompt_tokens) :]


def printable(text: str) -> str:
    """Replace every control character: an untrained model may write escape sequences that a terminal obeys."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


_USUAL_TOKENS = 200
"""Tokens of a sample of a job that prints none while it trains (`train.sample_tokens = 0`)."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A checkpoint, and the job that wrote it."""

    checkpoint: Path
    manifest: Mapping[str, Any]
    job: Job

    @classmethod
    def of(cls, run: str | Path | None, *, allow_code: bool = False) -> StoredRun:
        """Return the newest checkpoint of a run folder, or of a folder in it that holds checkpoints, or one checkpoint;
        without a run, that of the newest one below `runs`.

        Where `allow_code` is set, functions that only the checkpoint names may be run.

        Raises:
            CheckpointError: there is none, or it names a function that the caller has not named.
        """
        folder = Path(run) if run is not None else run_folder.newest("to read")
        is_checkpoint = (folder / "manifest.json").exists()
        path = (
            folder if is_checkpoint else manifests.latest(folder / run_folder.CHECKPOINTS) or manifests.latest(folder)
        )
        if path is None:
            raise CheckpointError(
                "run-folder-missing", f"{folder} holds no checkpoint. Use a run folder, or a checkpoint in it"
            )
        manifest = manifests.read_manifest(path)
        job = Job(lambda key: str(path), **manifest["job"])
        if not allow_code:
            foreign_code.refuse(job, path)
        return cls(path, manifest, job)

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shapes of the weights that the files hold, by name: trained ones, and frozen ones that have changed."""
        return {**self.manifest["shapes"], **self.manifest.get("frozen", {})}

    def check(self, model: nn.Module) -> None:
        """Refuse a damaged checkpoint, and one of another model.

        Raises:
            CheckpointError: it is one of these.
        """
        params = {name: list(param.shape) for name, param in model.named_parameters()}
        trained = {name: shape for name, shape in params.items() if name in self.manifest["shapes"]}
        manifests.check_shapes(self.manifest, trained, self.checkpoint)
        for name, shape in self.manifest.get("frozen", {}).items():
            if params.get(name) != shape:
                raise CheckpointError(
                    "checkpoint-other-model",
                    f"{self.checkpoint} holds another model's weights: {name} {shape}, here {params.get(name, 'missing')}",
                )
        manifests.check_digests(self.manifest, self.checkpoint)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The loss of a checkpoint over held-out samples."""

    checkpoint: Path
    step: int
    loss: float
    """That of the set that decides (`train.monitor`)."""
    samples: int
    """The number of its samples."""
    losses: Mapping[str, float]
    """The loss of each held-out set, by name."""
    judge: str

    def to_record(self) -> dict[str, Any]:
        """Return everything as plain data."""
        record = {"checkpoint": str(self.checkpoint), "step": self.step, "loss": self.loss, "samples": self.samples}
        return {**record, "losses": dict(self.losses)}

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.to_text())

    def to_text(self) -> str:
        """Return one line for the screen."""
        losses = describe_losses(self.losses, self.judge)
        return f"{self.checkpoint}: {losses} over {self.samples} samples, after step {self.step}"


@calls.checked
def evaluate(
    run: str | Path | None = None, *, samples: int | None = None, ema: bool = False, allow_code: bool = False
) -> Evaluation:
    """Return the mean loss of a checkpoint over validation samples: by default the samples that the run itself evaluates.

    With `ema`, or if the job sets `train.evaluate_ema`, the model has the moving averages of its weights. Functions that no run of yours has
    named are run only with `allow_code`.

    Raises:
        CheckpointError: there is no checkpoint, it does not fit the job, or it holds no averages.
        DataError: the job has no validation data.
    """
    stored = StoredRun.of(run, allow_code=allow_code)
    job, count = stored.job, samples or stored.job.train.evaluate_samples
    job = job.model_copy(update={"train": job.train.model_copy(update={"evaluate_samples": count})})
    judge = job.judge
    if judge is None:
        raise DataError("held-out-missing", "the job holds no samples out. Use data.held_out above 0 and --samples N")
    workload = Workload(job, Layout())
    ready = _prepare_run(stored, workload, averaged=ema or job.train.evaluate_ema)
    losses = held_out_losses(ready, workload)
    samples = min(count, len(workload.held_out[judge]))
    return Evaluation(stored.checkpoint, stored.manifest["step"], losses[judge], samples, losses, judge)


@calls.checked
def sample(
    run: str | Path | None = None,
    prompt: str = "",
    *,
    chat: str | None = None,
    tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    ema: bool = False,
    allow_code: bool = False,
) -> str:
    """Return a prompt and its continuation by the model of a checkpoint; temperature 0 takes the likeliest token.

    With `chat`, a user's message, return only the reply: the message is formatted like the conversations in training, by the tokenizer's chat
    template if it has one. By default, tokens, temperature and seed come from the job; a job without tokens uses 200. A model of transformers
    uses a key-value cache; others read the full text for each token. With `ema`, or if the job sets `train.evaluate_ema`, the model has the
    moving averages of its weights. Functions that no run of yours has named are run only with `allow_code`.

    Raises:
        CheckpointError: there is no checkpoint, it does not fit the job, or it holds no averages.
        DataError: the job's samples are not text.
        ModelError: the model gives no logits of tokens, or has too few positions.
    """
    stored = StoredRun.of(run, allow_code=allow_code)
    job, train = stored.job, stored.job.train
    if not job.data.is_text:
        raise DataError(
            "no-text-to-sample",
            f"data.source = {job.data.source!r} is not text, so there is no tokenizer to decode generated tokens. Use a run on text",
        )
    count = (train.sample_tokens or _USUAL_TOKENS) if tokens is None else tokens
    if count < 1:
        raise DataError("value-out-of-range", f"tokens = {count}: a sample has 1 token or more")
    heat = train.sample_temperature if temperature is None else temperature
    seed = train.seed if seed is None else seed
    tokenizer, text = open_tokenizer(job), prompt or train.prompt
    prompt_tokens = (
        wings.required("readers", "chat").opening(chat, tokenizer) if chat is not None else tokenizer.encode(text)
    )
    averaged = ema or train.evaluate_ema
    model = _generating(stored, averaged=averaged)
    begin = list(tokenizer.begin_ids) if chat is None and model is not None else []  # a template writes its own
    if tokens is None and model is not None and (room := _room_behind(model, begin + prompt_tokens)) > 0:
        count = min(count, room)
    if not prompt_tokens and not begin:
        prompt_tokens = [tokenizer.end_id or 0]
    sampled = (
        sample_tokens(
            _prepare_run(stored, Workload(job, Layout()), averaged=averaged), prompt_tokens, count, heat, seed
        )
        if model is None
        else _generate_tokens(model, job, begin + prompt_tokens, count, heat, seed)
    )
    if sampled is None:
        raise ModelError("no-text-to-sample", f"{job.model.source} gives no logits of tokens, which sampling needs")
    return tokenizer.decode(sampled if chat is not None else prompt_tokens + sampled)


def _prepare_run(stored: StoredRun, workload: Workload, *, averaged: bool) -> Run:
    """Return a run of one rank with the weights of a checkpoint, or with their averages."""
    place = RankInfo(0, 0, 1, 1, torch.device(resolve_device(stored.job.run.device)))
    ready = Run(workload.source, Layout(), workload.job.of_one_model, place)
    ready.prepare(workload.example)
    checkpoint.load(ready, stored.checkpoint, averaged=averaged, may_change=OF_SEVERAL)
    return ready


def _generating(stored: StoredRun, *, averaged: bool) -> nn.Module | None:
    """Return the model of a checkpoint, if transformers can generate with it; else None."""
    job, cpu = stored.job, torch.device("cpu")
    plan = blueprint_of(job)
    can_generate = getattr(plan.module, "can_generate", None)
    if can_generate is None or not can_generate():
        return None
    stored.check(plan.module)
    model = plan.module
    with ExitStack() as stack:
        files = OpenCheckpoint.open(stored.checkpoint, stored.manifest, stack, averaged=averaged)
        value = checkpoint_files.values(plan, files)
        fill(plan, lambda name: value(name).to(torch.float32, copy=True), cpu)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in plan.canonical:
                    buffer.copy_(value(name))
    return model.to(resolve_device(job.run.device)).eval()


def _room_behind(model: Any, tokens: list[int]) -> int:
    """Return the number of positions that a model has after the given tokens; 0 where that is unknown, or there is
    none."""
    most = setting(model, POSITIONS_FIELD)
    return most - len(tokens) if isinstance(most, int) else 0


def _generate_tokens(model: Any, job: Job, tokens: list[int], count: int, temperature: float, seed: int) -> list[int]:
    """Return the tokens that transformers generates after the given ones, with a cache of keys and values.

    Raises:
        ModelError: the model has fewer positions than the text has tokens.
    """
    tokenizer, most = open_tokenizer(job), setting(model, POSITIONS_FIELD)
    if isinstance(most, int) and len(tokens) + count > most:
        raise ModelError(
            "model-data-sizes",
            f"{len(tokens)} tokens of a prompt and {count} more are over the {most} positions. Use a smaller --tokens",
        )
    words = setting(model, VOCABULARY_FIELD)
    unknown = list(range(tokenizer.vocab_size, words)) if isinstance(words, int) else []
    settings: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        settings = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    device = next(model.parameters()).device
    read = torch.tensor([tokens], device=device)
    with quiet(), torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        outputs = model.generate(
            read,
            attention_mask=torch.ones_like(read),
            max_new_tokens=count,
            use_cache=True,
            suppress_tokens=unknown or None,
            eos_token_id=tokenizer.end_id,
            pad_token_id=tokenizer.end_id or 0,
            **settings,
        )
    return [int(token) for token in outputs[0, len(tokens) :]]


ExportForm = Literal["transformers", "safetensors", "dcp"]
_DTYPES: dict[Precision, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Exported:
    """A folder that was written, and the checkpoint that it holds."""

    folder: Path
    checkpoint: Path
    step: int
    size_bytes: int
    """The bytes of all its files."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.to_text())

    def to_text(self) -> str:
        """Return one line for the screen."""
        return f"{self.folder}: the weights after step {self.step}, {self.size_bytes:,} bytes, from {self.checkpoint}"


@calls.checked
def export(
    run: str | Path | None,
    out: str | Path,
    *,
    dtype: Precision | None = None,
    merge: bool = False,
    ema: bool = False,
    form: ExportForm | None = None,
    allow_code: bool = False,
) -> Exported:
    """Write the model of a run's newest checkpoint, or of one checkpoint, as a new folder.

    A model of transformers is written for `from_pretrained`, and adapters (`model.lora`) for peft. For a module of your own, the plain state
    dict is written as one safetensors file; `form="safetensors"` does this for any model. With `form="dcp"` the folder is a checkpoint of
    `torch.distributed.checkpoint`, for any model, with the state dict below `model`.

    Without a run, samestep takes the newest run below `runs`. Without a dtype, weights keep the dtype of the master weights. With `merge`, the
    full model of a job with adapters is written, with the adapters added into its weights. With `ema`, the moving averages (`train.ema`) are
    written instead of the weights. Functions that no run of yours has named are run only with `allow_code`.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, it holds the weights of another model, or no averages.
        JobError: the folder exists already, or there are no adapters to merge, or none that the model without them can hold.
        ModelError: `form` is for a model of transformers, and this is another one; or its state dict cannot be a safetensors file.
    """
    folder = Path(out)
    durable_files.refuse_remote(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise JobError("run-folder-taken", f"--out {folder} exists. Use a new folder")
    stored = StoredRun.of(run, allow_code=allow_code)
    plan = blueprint_of(stored.job)
    stored.check(plan.module)
    merged = lora().merged(plan, stored.job) if merge else None
    draft = folder.with_name(f".{folder.name}.draft")
    try:
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(parents=True)
        _write(stored, plan, merged, draft, _DTYPES[dtype] if dtype else None, form, averaged=ema)
        if folder.is_dir():
            folder.rmdir()
        draft.rename(folder)
    except OSError as error:
        raise JobError(
            "run-folder-unwritable", f"--out {folder} cannot be written: {error.strerror} ({error.filename})"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # of an export that failed
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    return Exported(folder, stored.checkpoint, stored.manifest["step"], size_bytes)


def _write(
    stored: StoredRun,
    plan: Blueprint,
    merged: Merged | None,
    out: Path,
    dtype: torch.dtype | None,
    form: ExportForm | None,
    *,
    averaged: bool,
) -> None:
    """Write the model of a checkpoint, or the one into whose weights its adapters are added, in one of the forms."""
    written, job = (merged.plan, merged.job) if merged else (plan, stored.job)
    if form == "transformers" or (form is None and (job.model.lora is not None or is_of_transformers(written))):
        pretrained = PretrainedForm.of(written, job, merged)
        checkpoint_files.write(pretrained, stored.checkpoint, stored.manifest, out, dtype, averaged=averaged)
        return
    master = torch.float64 if job.numerics.precision == "float64" else torch.float32
    with ExitStack() as stack:
        opened = OpenCheckpoint.open(stored.checkpoint, stored.manifest, stack, averaged=averaged)
        value = checkpoint_files.values(plan, opened)
        value = merged.values(value) if merged else value
        if form == "dcp":
            torch_checkpoint.write(written.module, value, out, dtype or master)
        else:
            write_state(written.module, value, out, dtype)


def write_state(model: nn.Module, value: Callable[[str], Tensor], out: Path, dtype: torch.dtype | None) -> None:
    """Write a model's state dict into a folder; tensors with floating numbers are cast to `dtype`, if one is given.

    A tied tensor is written under each of its names, as a state dict has it. The whole model is in memory meanwhile.

    Raises:
        ModelError: the state dict holds something that is no tensor, or a dtype that the format lacks.
        OSError: the file cannot be written.
    """
    state = model.state_dict()
    if strange := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise ModelError(
            "export-form",
            f"{strange[0]} in the state dict of {type(model).__name__} is not a tensor, and a file of safetensors holds tensors alone. Use a "
            "registered buffer in place of get_extra_state",
        )
    tensors = {}
    for name in state:
        tensor = value(name)
        tensors[name] = cast_to(tensor, dtype or tensor.dtype)
    try:
        save_file(tensors, out / ONE_FILE, {"format": "pt"})
    except (SafetensorError, KeyError, ValueError) as error:
        raise ModelError(
            "export-form", f"the state dict of {type(model).__name__} is not a file of safetensors: {error}"
        ) from None
    durable_files.sync(out / ONE_FILE)
    durable_files.sync(out)
