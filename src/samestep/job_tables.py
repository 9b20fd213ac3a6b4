"""The tables of a job: their keys, the values that each may have, and what each means.

The docstring of a key is its line in the reference of the docs. The optimizer and its schedule are in `optimizer_tables.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from samestep.errors import JobError, UnprovenError, mistakes_in, short_repr, types_in, without_removed
from samestep.layout import MOST_RANKS, MOST_SAMPLES
from samestep.rules import RULES

Precision = Literal["float64", "float32", "bf16", "fp16"]
PRESET = "preset:"
LossOver = Literal["sample", "batch"]
OnNonFinite = Literal["skip", "stop", "continue"]
OnSpike = Literal["continue", "skip", "rollback"]
OptimizerStates = Literal["float32", "8bit"]
CompileMode = Literal["default", "max-autotune-no-cudagraphs"]
Compression = Literal["none", "bf16", "int8", "powersgd"]
"""`none`, or the codec of a gradient: a row of `program/codecs.py`."""
Task = Literal["causal", "masked", "seq2seq", "image", "speech", "vision-language"]
Turns = Literal["all", "last", "each"]
"""The replies of a conversation that are learned, in one document or in several."""
Convention = Literal["aligned", "next"]
"""The token that the label at a place stands for: the one at that place, or the next one."""
Waiver = Literal["samples", "loss", "random", "state", "optimizer", "data", "build", "resume", "memory"]
"""The subject of a refusal: samples that influence each other, the loss as a sum over samples, random numbers, state that a
forward writes, the rule of the optimizer, the data set, the values that a build gives, what a checkpoint holds, the memory that a run is predicted to need."""
MayChange = Literal[
    "optimizer.lr", "optimizer.weight_decay", "optimizer.clip_norm", "optimizer.no_weight_decay",
    "schedule.name", "schedule.warmup_steps", "schedule.final_ratio", "train.global_batch",
    "data.source", "data.mixture", "data.tokenizer",
]  # fmt: skip
"""Keys that change the result, and that a resume may change where `run.allow` names them."""

MOST_STEPS = 10**11
"""The largest number of steps; times `MOST_SAMPLES` it is below 2^63, so every position in the order of samples is an int64."""
MOST_TOKENS = 2**24
"""The largest number of tokens of a sample: longer than any published context, and its square times 2^12 is an int64."""
MOST_SECONDS = 10.0**8
"""The longest time limit, three years; process groups count milliseconds."""
MOST_THREADS = 1024
"""The largest number of threads of a worker."""
MOST_SCALE = 3e37
"""The largest learning rate and weight decay: Adam's first step, ten times as large, is still a float32."""

NO_MPS = "torch has no process groups on MPS devices, and no float64 to prove layouts. Use cpu"
"""Why Apple's GPUs are refused."""
_TOKENS = re.compile(r"tokenizer(:[1-9][0-9]{0,5})?")
_STEPS = re.compile(r"[1-9][0-9]{0,11}:[1-9][0-9]{0,11}")


class Table(BaseModel):
    """Keys with their types and ranges; other keys are mistakes."""

    def __init__(self, source: Callable[[str], str] | None = None, /, **keys: Any) -> None:
        """Check the keys; `source` returns, for a key, the origin that an error about it begins with, by default the table's name.

        Raises:
            JobError: all mistakes in the keys, one a line.
        """
        try:
            super().__init__(**keys)
        except ValidationError as error:
            source = source or (lambda _: type(self).__name__)
            raise JobError(*mistakes_in(error, source, type(self))) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # a table within a job reports to the job

    # Infinite numbers are refused in keys, and written as such in free tables, so that a spec's subprocess reads them.
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )

    @model_validator(mode="before")
    @classmethod
    def _removed_keys_may_ask_for_nothing(cls, keys: Any) -> Any:
        return without_removed(keys) if isinstance(keys, dict) else keys

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_is_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` where a number belongs, which pydantic takes for 1."""
        if isinstance(value, bool) and {int, float} & set(types_in(cls.model_fields[info.field_name or ""].annotation)):
            raise JobError("job-value", f"input should be a number, got {value!r}")
        return value


def _range_of_steps(text: str, works: str) -> str:
    """Return the text of a range of steps, which may be empty.

    Raises:
        JobError: it is not of the form FIRST:LAST, or ends before it begins.
    """
    first, _, last = text.partition(":")
    if text and (not _STEPS.fullmatch(text) or int(last) < int(first)):
        wrong = "ends before it begins" if _STEPS.fullmatch(text) else "names no steps"
        raise JobError("steps-range", f"{text!r} {wrong}. Use FIRST:LAST, such as {works}")
    return text


ALL_LINEAR = "all-linear"
"""The word among the targets of adapters for all linear layers but the head."""


class LoraTable(Table):
    """Low-rank adapters (LoRA), trained instead of the weights of some linear layers and embeddings."""

    targets: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of linear layers and embeddings, such as `q_proj`, or full paths; or `all-linear`: all linear layers except the head."""
    r: Annotated[int, Field(ge=1, le=2**20)] = 8
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0.0, le=MOST_SCALE)] = 16.0
    """The output of an adapter is multiplied by alpha / r."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout rate of the input of an adapter."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are fully trained and saved with the adapters, such as `lm_head`."""
    base: Literal["full", "nf4"] = "full"
    """Storage of the weights of all linear layers except the head: `full` is unchanged; `nf4` rounds them to 4 bits, and stores and gathers them in 4 bits (QLoRA)."""


class ModelTable(Table):
    """The model: `hf:FAMILY` (a transformers configuration), `hf:PATH` (a folder with pretrained weights to start from),
    `module:function` that returns an nn.Module, or `preset:resnet50`. Other presets, `preset:NAME`, can only be planned and simulated."""

    source: str = ""
    """`hf:FAMILY`, `hf:PATH`, `module:function`, or `preset:NAME`; a run in a loop of one's own needs none."""
    config: dict[str, Any] = {}
    """Overrides of fields of the configuration (of the family, the folder or the preset), or keyword arguments of the function."""
    task: Task = "causal"
    """`hf:` only: the task of the model: `causal`, `masked`, `seq2seq`, `image`, `speech` or `vision-language`."""
    resize_embeddings: int | str | None = None
    """`hf:PATH` only: the size of the token embedding and the head: a number, `tokenizer` for at least the size of
    `data.tokenizer`, or `tokenizer:64` for the next multiple of 64. New rows are initialized as in a new model."""
    freeze: tuple[str, ...] = ()
    """Patterns of the names of frozen parameters, such as `model.embed_tokens.*` or `*norm*`."""
    stages: tuple[str, ...] = ()
    """Names of modules that may begin a pipeline stage, such as `["encoder.3", "head"]`. By default every block may begin a stage;
    in a model without a list of blocks, every module that it calls. Does not affect the result."""
    offload: tuple[str, ...] = ()
    """Parameter offloading of frozen modules, such as `["reference"]`: their weights are in CPU memory, and on the device only
    while a forward or backward pass reads them. Does not affect the result."""
    lora: LoraTable | None = None
    """LoRA adapters by peft on some linear layers; everything else is frozen: `{ targets = ["q_proj", "v_proj"], r = 8, alpha = 16.0,
    dropout = 0.0, modules_to_save = [], base = "full" }`. With `base = "nf4"` the weights of all linear layers except the head are
    stored in 4 bits (QLoRA)."""

    @field_validator("resize_embeddings", mode="before")
    @classmethod
    def _size_is_known(cls, asked: Any) -> Any:
        is_number = isinstance(asked, int) and 1 <= asked < 2**31
        if asked is None or is_number or (isinstance(asked, str) and _TOKENS.fullmatch(asked)):
            return asked
        raise JobError(
            "job-value", f"input should be a number from 1, 'tokenizer' or 'tokenizer:64', got {short_repr(asked)}"
        )

    @model_validator(mode="after")
    def _shape_is_no_module(self) -> ModelTable:
        if self.preset is not None and (self.freeze or self.stages or self.offload):
            key = next(key for key in ("freeze", "stages", "offload") if getattr(self, key))
            raise JobError(
                "job-keys-conflict",
                f"{key} names parts of a module, and {self.source} is a shape. Use hf:FAMILY and module:function",
            )
        return self

    def named(self) -> str:
        """Return the source of the model.

        Raises:
            JobError: the job names none.
        """
        if not self.source:
            raise JobError(
                "job-without-model",
                'model.source is missing, and a job has no model by default. Use "module:function", "hf:PATH" with a folder of '
                'transformers, or "hf:llama" with sizes in model.config',
            )
        return self.source

    @property
    def preset(self) -> str | None:
        """Name of the preset; None where the model is a module."""
        return self.source.removeprefix(PRESET) if self.source.startswith(PRESET) else None

    @property
    def takes_tokens(self) -> bool:
        """Whether this is a model of transformers whose only input are the ids of tokens."""
        return self.source.startswith("hf:") and self.task in ("causal", "masked")


HELD_OUT = "held_out"
"""The name of the part of the data that is held out, among those of `data.held_out_sets`."""


class DataTable(Table):
    """The data, and its conversion to samples."""

    source: str = "topics"
    """The source of the data: topics, stdlib, text:PATH, tokens:PATH, jsonl:PATH, parquet:PATH, hf:PATH, digits, images:PATH,
    `module:function`, or mixture."""
    mixture: dict[str, Annotated[float, Field(gt=0.0, le=MOST_SCALE)]] = {}
    """With `source = "mixture"`: the sources, each with its weight in the mixture, in any unit."""
    tokenizer: str = "bytes"
    """`bytes`, or a folder with a tokenizer."""
    sequence_length: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 64
    """Number of tokens in a sample."""
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """Fraction of the data, from its end, that is the validation set: it is not trained on."""
    held_out_sets: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")], str] = {}
    """More validation sets, by names that you choose: `{ code = "text:PATH" }`. A source that is also trained on contributes its
    held-out fraction; any other source contributes all its samples."""
    labels: Convention | None = None
    """Your own dataset with a causal transformers model only: `aligned` if labels[t] is the token at t (the model shifts them), `next` if
    it is the token after t. By default this is detected from the samples."""
    text_field: str = "text"
    """Name of the field with the text, in a JSON line or a dataset row; `doc.text` is a nested field."""
    turns: Turns = "all"
    """Replies of a conversation that are trained on: `all` in one document, `each` in a document that ends with the reply, or only the `last`."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    """Data type of the numbers in a token file."""
    image_size: Annotated[int, Field(ge=1, le=2**14)] = 224
    """`images:` only: height and width in pixels. The shorter side is resized to it, then the center is cropped."""
    image_channels: Literal[1, 3] = 3
    """`images:` only: 3 for colour, 1 for greyscale."""
    image_mean: Annotated[tuple[float, ...], Field(min_length=1, max_length=3)] = (0.5,)
    """`images:` only: mean that is subtracted from the pixels (0 to 1): one number, or one for each channel."""
    image_std: Annotated[tuple[Annotated[float, Field(gt=0.0)], ...], Field(min_length=1, max_length=3)] = (0.5,)
    """`images:` only: standard deviation that pixels are divided by, after the mean is subtracted."""
    augment: tuple[Literal["crop", "flip"], ...] = ()
    """`images:` only: random augmentation in training, seeded by (seed, step, sample): `crop` removes up to an eighth, `flip` mirrors left and right."""

    @model_validator(mode="after")
    def _channels_have_numbers(self) -> DataTable:
        for key, values in (("image_mean", self.image_mean), ("image_std", self.image_std)):
            if len(values) not in (1, self.image_channels):
                raise JobError(
                    "job-keys-conflict",
                    f"{key} has {len(values)} numbers, and images have {self.image_channels} "
                    f"channel{'s' * (self.image_channels > 1)}. Use 1 number{', or 3' * (self.image_channels == 3)}",
                )
        if self.augment and not self.source.startswith("images:"):
            raise JobError(
                "job-keys-conflict",
                f"augment changes the images of images:PATH, and source is {self.source!r}. Use a dataset of your own with a method "
                "sample(index, generator)",
            )
        return self

    @property
    def is_text(self) -> bool:
        """Whether the samples are text that the tokenizer encodes."""
        texts = ("topics", "stdlib", "text", "jsonl", "parquet", "hf")
        return all(source.partition(":")[0] in texts for source in self.mixture or (self.source,))


class TrainTable(Table):
    """The training loop: the batch, the number of steps, the loss, and the evaluation."""

    global_batch: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 32
    """Global batch size: samples (sequences) per step, over all ranks and micro-batches."""
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 100
    """Number of optimizer steps of the run. The learning-rate schedule extends over them."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights, the order of samples, and the dropout masks."""
    loss: str = "cross_entropy"
    """`cross_entropy` (next token, see `data.labels`, or class), `mse`, `model` (the loss that the forward pass returns, given the
    labels), or `module:function` of (outputs, batch) -> (sum, count)."""
    loss_over: LossOver = "sample"
    """Scope of the loss function. `sample`: it is called with some samples and returns a sum over them. `batch`: it is called with the
    outputs and the batch of the full step, as contrastive losses need, and may return the loss itself (`samestep.whole_batch`)."""
    evaluate_samples: Annotated[int, Field(ge=0, le=MOST_SAMPLES)] = 256
    """Number of validation samples in an evaluation; 0 turns evaluation off."""
    evaluate_every: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """Steps between evaluations of the validation loss; 0 evaluates only at the end."""
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Decay of the exponential moving averages of the weights (EMA), such as 0.999. Checkpoints contain them. By default there are none."""
    evaluate_ema: bool = False
    """Whether evaluation and generation use the averages (`ema`) instead of the weights."""
    patience: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """Early stopping: the run ends after this many evaluations without a new best validation loss; 0 turns it off."""
    monitor: str = ""
    """Validation set that `patience` and `checkpoint.keep_best` monitor, a name of `data.held_out_sets`. By default the held-out
    fraction of the data; if `data.held_out` is 0, the first set."""
    prompt: str = ""
    """Prompt of the generated text."""
    sample_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 0
    """Number of tokens to generate when a run resumes and when its last step is done; 0 turns it off."""
    sample_temperature: Annotated[float, Field(ge=0.0, le=MOST_SCALE)] = 0.8
    """Sampling temperature; 0 takes the most likely token."""
    watch_every: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 100
    """Steps between self-checks: ranks are compared, and the forward pass of a sample and the update of a weight are repeated and
    compared. 0: only the check of samples in the first step."""
    record: str = ""
    """Steps to record, operation by operation, for `samestep explain`: `FIRST:LAST`, counted from 1, or a number of steps."""

    @field_validator("record", mode="before")
    @classmethod
    def _record_may_be_a_number(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("record")
    @classmethod
    def _record_is_steps(cls, text: str) -> str:
        return text if re.fullmatch("[1-9][0-9]{0,5}", text) else _range_of_steps(text, "100:104, or a number of steps")


class NumericsTable(Table):
    """Precision, and all other settings of the arithmetic that may change a result."""

    rules: Literal[2] = RULES
    """Version of the numerics rules (`src/samestep/rules.py`), written into resolved jobs. A resumed run without it has version 1."""
    precision: Precision = "float32"
    """Precision of weights and activations. bf16 and fp16 (mixed precision) keep float32 master weights, gradients and reductions."""
    tf32: bool = False
    """Whether float32 matmuls on GPUs may use TF32."""
    deterministic: bool = False
    """Whether to use deterministic kernels only. An operation without one raises an error that names it."""
    optimizer_states: OptimizerStates = "float32"
    """Precision of the optimizer states of torch's optimizers: 8bit has one scale for each block."""
    compression: Compression = "none"
    """Encoding of gradients where `replicas` are summed. "int8" has a scale for each block, and "powersgd" sends each matrix as a
    product of two narrow ones."""
    compression_rank: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 4
    """With `compression = "powersgd"`: rank of the low-rank approximation of each gradient matrix."""
    replicas: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 1
    """With `compression` or `exchange_every`: number of equal parts of the global batch. Within a part, gradients are reduced uncompressed."""
    exchange_every: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 1
    """DiLoCo and local SGD: steps between synchronizations of the replicas. If above 1, each replica trains its own weights and optimizer
    states, clipped by its own norm; then the changes of all replicas are averaged. Validation uses the averaged weights."""
    outer_lr: Annotated[float, Field(gt=0.0, le=MOST_SCALE)] = 0.7
    """With `exchange_every`: learning rate of the outer optimizer; 1 with `outer_momentum = 0` averages weights (local SGD)."""
    outer_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """With `exchange_every`: Nesterov momentum of the outer optimizer. The DiLoCo paper uses 0.9, with a few hundred steps between synchronizations."""
    batch_norm_group: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] | None = None
    """Batch-norm group size: number of consecutive samples that share batch-norm statistics, as in SyncBatchNorm; by default the global batch."""
    on_nonfinite: OnNonFinite = "stop"
    """Action if the loss or a gradient is not finite. The log names the module at fault."""
    max_skipped: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 100
    """Number of consecutive steps that may be skipped, including steps without a valid label; one more ends the run."""
    on_spike: OnSpike = "continue"
    """Action if a loss exceeds the mean of the last `spike_window` losses by more than `spike_deviations` standard deviations. `skip` skips
    the update; `rollback` also loads the weights of the newest checkpoint and continues after the step."""
    spike_window: Annotated[int, Field(ge=10, le=MOST_STEPS)] = 100
    """With `on_spike`: number of previous losses in the mean. No earlier loss is a spike."""
    spike_deviations: Annotated[float, Field(gt=0.0, le=MOST_SCALE)] = 6.0
    """With `on_spike`: standard deviations above the mean that make a loss a spike. A standard deviation counts as at least mean / 1000."""
    loss_scale: Annotated[float, Field(ge=1e-30, le=1e30)] = 65536.0
    """fp16 only: initial loss scale. An overflow halves it and skips the step."""
    loss_scale_growth_steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 2000
    """fp16 only: steps without an overflow before the loss scale doubles."""


class CheckpointTable(Table):
    """Checkpoints: the files that a run resumes from."""

    every: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """Steps between checkpoints; 0 writes only the last one."""
    keep: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 2
    """Number of newest checkpoints to keep."""
    keep_every: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """Keep the checkpoint of every N-th step permanently; 0 keeps none."""
    background: bool = False
    """Whether training continues while a checkpoint is written (asynchronous checkpoints); it waits only for a copy to CPU memory."""
    on_failure: Literal["continue", "stop"] = "continue"
    """Action if a checkpoint cannot be written, for example on a full disk. The last checkpoint must always be written."""
    keep_best: bool = False
    """Whether to keep the checkpoint with the best validation loss in RUN/best (see `train.evaluate_every`)."""
    save_pretrained: bool = False
    """Whether each checkpoint also has a folder `pretrained` for from_pretrained of transformers."""


class RunTable(Table):
    """Settings of this machine. None of them changes a result."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device; auto uses GPUs if there are any."""
    folder: str | None = None
    """Folder that is searched for the paths and modules of the job, before the working directory; by default the folder of the job file."""
    ranks: Annotated[int, Field(ge=1, le=MOST_RANKS)] | None = None
    """Number of worker processes; by default the ranks of the layout, or without a layout all GPUs, or 2."""
    threads: Annotated[int, Field(ge=1, le=MOST_THREADS)] = 1
    """Number of CPU threads per worker."""
    data_workers: Annotated[int, Field(ge=0, le=MOST_THREADS)] = 0
    """Number of data-loading processes per rank; with 0, a thread reads ahead if reading is slow."""
    ranks_per_node: Annotated[int, Field(ge=1, le=MOST_RANKS)] | None = None
    """Number of ranks per node, for reduce=hierarchical; by default the number given by the launcher."""
    timeout_s: Annotated[float, Field(ge=0.001, le=MOST_SECONDS)] = 600.0
    """Timeout of a collective in seconds. After it, the run is aborted."""
    restarts: Annotated[int, Field(ge=0, le=MOST_THREADS)] = 0
    """Number of restarts from the newest checkpoint after a worker failed."""
    hang_s: Annotated[float, Field(ge=0.001, le=MOST_SECONDS)] = 120.0
    """Hang timeout in seconds, or 10 median steps if that is longer: the run ends if all ranks stand still in a step after the first one. It is
    also the timeout for an unresponsive rank, including while it saves."""
    compile: Literal["none", "blocks"] = "none"
    """`torch.compile` in training: `blocks` compiles each block. The first step compiles."""
    compile_backend: str = "inductor"
    """Backend of `torch.compile`: inductor, or another one such as aot_eager."""
    compile_mode: CompileMode = "default"
    """`mode` of `torch.compile`, for inductor only. max-autotune-no-cudagraphs benchmarks kernels and uses the fastest."""
    attention: Literal["auto", "flash", "cudnn", "math", "efficient"] = "auto"
    """Attention kernel of torch: auto lets torch choose; another value uses that kernel or raises an error. CPUs have flash and math."""
    allow: tuple[Waiver | MayChange, ...] = ()
    """Checks to skip, by the name at the end of their error text, and keys that may differ from the checkpoint. Summaries list them."""
    report: tuple[str, ...] = ()
    """Loggers of each step, in addition to the run folder: `wandb`, `mlflow`, or `module:function` of (StepReport)."""
    log_every: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    """Steps between log lines; by default every step is logged, and 40 to 80 of them are printed."""
    profile: str = ""
    """Steps to profile with torch.profiler, as `FIRST:LAST`: a trace of every rank, and on GPUs the memory history."""

    @field_validator("device", mode="before")
    @classmethod
    def _device_is_no_mps(cls, word: Any) -> Any:
        if word == "mps":
            raise JobError("mps-unsupported", NO_MPS)
        return word

    @field_validator("report", mode="before")
    @classmethod
    def _report_may_be_one(cls, words: Any) -> Any:
        return (words,) if isinstance(words, str) and words else words or ()

    @field_validator("profile")
    @classmethod
    def _profile_is_a_range(cls, text: str) -> str:
        return _range_of_steps(text, "10:12, counted from 1")

    def __eq__(self, other: object) -> bool:
        """Return whether the settings are equal, wherever the job file is."""
        if not isinstance(other, RunTable):
            return NotImplemented
        return self.model_dump(exclude={"folder"}) == other.model_dump(exclude={"folder"})

    def __hash__(self) -> int:
        return hash(self.model_dump_json(exclude={"folder"}))

    @model_validator(mode="after")
    def _mode_is_of_inductor(self) -> RunTable:
        if self.compile_mode != "default" and self.compile_backend != "inductor":
            raise JobError(
                "job-keys-conflict",
                f"compile_mode = {self.compile_mode!r} is for inductor, and compile_backend = {self.compile_backend!r} takes no mode. Set "
                "compile_backend = 'inductor', or compile_mode = 'default'",
            )
        return self

    @property
    def profiled_steps(self) -> range:
        """The steps that are profiled, counted from 1."""
        first, _, last = self.profile.partition(":")
        return range(int(first), int(last) + 1) if self.profile else range(0)

    @property
    def waivers(self) -> tuple[Waiver, ...]:
        """The words of `allow` that waive refusals."""
        return tuple(word for word in get_args(Waiver) if word in self.allow)

    _met: list[str] = PrivateAttr(default_factory=list)

    @property
    def met(self) -> tuple[str, ...]:
        """The refusals that this process met and `allow` waived, each once, for the run's summary."""
        return tuple(self._met)

    def waived(self, waiver: Waiver, code: str, reason: str) -> str:
        """Note a refusal that `allow` waives, which every summary of the run then lists, and return its text.

        Raises:
            UnprovenError: it is not waived.
        """
        if waiver not in self.allow:
            raise UnprovenError(code, reason, waiver)
        text = f'{reason} (allowed by run.allow = ["{waiver}"])'
        if text not in self._met:
            self._met.append(text)
        return text
