"""The tables of a job: their keys, the values that each may have, and what each means.

The docstring of a key is its line in the reference of the docs. The optimizer and its schedule are in `optimizer_tables.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from samestep.errors import UnprovenError, short_repr
from samestep.layout_limits import MOST_RANKS, MOST_SAMPLES
from samestep.rules import RULES

Precision = Literal["float64", "float32", "bf16", "fp16"]
PRESET = "preset:"
LossOver = Literal["sample", "batch"]
OnNonFinite = Literal["skip", "stop", "continue"]
OnSpike = Literal["continue", "skip", "rollback"]
OptimizerStates = Literal["float32", "bf16", "8bit"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Compression = Literal["none", "bf16", "fp16", "int8", "int4", "topk", "powersgd"]
"""`none`, or the codec of a gradient: a row of `program/codecs.py`."""
Task = Literal["causal", "masked", "seq2seq", "image", "speech", "vision-language"]
Turns = Literal["all", "last", "each"]
"""The replies of a conversation that are learned, in one document or in several."""
Convention = Literal["aligned", "next"]
"""The token that the label at a place stands for: the one at that place, or the next one."""
Waiver = Literal["samples", "loss", "random", "state", "optimizer", "data", "build", "resume"]
"""The subject of a refusal: samples that influence each other, the loss as a sum over samples, random numbers, state that a
forward writes, the rule of the optimizer, the data set, the values that a build gives, what a checkpoint holds."""
WITHOUT_CUDA_GRAPHS: dict[CompileMode, CompileMode] = {
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
}
"""The modes of a compiler that capture no CUDA graph, by those that differ from them in this alone."""


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

NO_MPS = "torch has no process groups on MPS devices and no float64, in which layouts are proven; cpu works"
"""Why Apple's GPUs are refused."""
_TOKENS = re.compile(r"tokenizer(:[1-9][0-9]{0,5})?")
_STEPS = re.compile(r"[1-9][0-9]{0,11}:[1-9][0-9]{0,11}")


class Table(BaseModel):
    """Keys with their types and ranges; other keys are mistakes."""

    # Infinite numbers are refused in keys, and written as such in free tables, so that a spec's subprocess reads them.
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_is_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` where a number belongs, which pydantic takes for 1."""
        if isinstance(value, bool) and {int, float} & set(types_in(cls.model_fields[info.field_name or ""].annotation)):
            raise ValueError(f"input should be a number, got {value!r}")
        return value


def types_in(kind: Any) -> Iterator[Any]:
    """Yield a type and, recursively, its type arguments."""
    yield kind
    for part in get_args(kind):
        yield from types_in(part)


ALL_LINEAR = "all-linear"
"""The word among the targets of adapters for all linear layers but the head."""


class LoraTable(Table):
    """Low-rank adapters, which are trained in place of the weights of some linear layers and embeddings."""

    targets: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of linear layers and embeddings, such as `q_proj`, or whole paths of some; or `all-linear`: all linear layers but the head."""
    r: Annotated[int, Field(ge=1, le=2**20)] = 8
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0.0, le=MOST_SCALE)] = 16.0
    """The output of an adapter is multiplied by alpha / r."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout rate of the input of an adapter."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that are trained whole and saved with the adapters, such as `lm_head`."""
    base: Literal["full", "nf4"] = "full"
    """Weights of all linear layers but the head: `full` as they are, or `nf4`: rounded to 4 bits, and held and gathered so (QLoRA)."""


class ModelTable(Table):
    """The model: `hf:FAMILY` (a transformers configuration), `hf:PATH` (a folder with weights, from which training starts),
    `module:function` that returns an nn.Module, `preset:resnet50`, or, to plan and simulate only, another `preset:NAME`."""

    source: str = "hf:llama"
    """`hf:FAMILY`, `hf:PATH`, `module:function`, or `preset:NAME`."""
    config: dict[str, Any] = {}
    """Fields of the family's, the folder's or the preset's configuration to override, or keyword arguments of the function."""
    task: Task = "causal"
    """For `hf:`, the task of the model: `causal`, `masked`, `seq2seq`, `image`, `speech` or `vision-language`."""
    resize_embeddings: int | str | None = None
    """For a folder, the number of tokens of its embedding and its head: a number, `tokenizer` for at least those of
    `data.tokenizer`, or `tokenizer:64` for the next multiple of 64. New entries are drawn as in a new model."""
    freeze: tuple[str, ...] = ()
    """Patterns (`model.embed_tokens.*`, `*norm*`) of the names of parameters that are not trained."""
    stages: tuple[str, ...] = ()
    """Names of modules with which the later stages of a pipeline may begin, such as `["encoder.3", "head"]`; by default they begin
    with blocks, or in a model without a list of blocks with any module that it calls. Changes no result."""
    offload: tuple[str, ...] = ()
    """Names of modules whose weights take no gradient, such as `["reference"]`: they are in the host's memory, and on the device
    while a forward or a backward reads them. Changes no result."""
    lora: LoraTable | None = None
    """Adapters by peft on some linear layers, all else frozen: `{ targets = ["q_proj", "v_proj"], r = 8, alpha = 16.0, dropout = 0.0,
    modules_to_save = [], base = "full" }`; with `base = "nf4"` the weights of all linear layers but the head are
    rounded to 4 bits, and held so (QLoRA)."""

    @field_validator("resize_embeddings", mode="before")
    @classmethod
    def _size_is_known(cls, asked: Any) -> Any:
        is_number = isinstance(asked, int) and 1 <= asked < 2**31
        if asked is None or is_number or (isinstance(asked, str) and _TOKENS.fullmatch(asked)):
            return asked
        raise ValueError(f"input should be a number from 1, 'tokenizer' or 'tokenizer:64', got {short_repr(asked)}")

    @model_validator(mode="after")
    def _shape_is_no_module(self) -> ModelTable:
        if self.preset is not None and (self.freeze or self.stages or self.offload):
            key = next(key for key in ("freeze", "stages", "offload") if getattr(self, key))
            raise ValueError(
                f"{key} names parts of a module, and {self.source} is a shape: hf:FAMILY and module:function work"
            )
        return self

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
    """The data, and how it becomes samples."""

    source: str = "topics"
    """topics, stdlib, text:PATH, tokens:PATH, jsonl:PATH, parquet:PATH, hf:PATH, digits, images:PATH, `module:function`, or mixture."""
    mixture: dict[str, Annotated[float, Field(gt=0.0, le=MOST_SCALE)]] = {}
    """With `source = "mixture"`: sources, and the share of the samples that each one gives, in any unit."""
    tokenizer: str = "bytes"
    """`bytes`, or a folder that holds a tokenizer."""
    sequence_length: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 64
    """Tokens of a sample."""
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    """Fraction at the end of the data that is held out of training."""
    held_out_sets: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")], str] = {}
    """Sources that are evaluated besides, by names of your own: `{ code = "text:PATH" }`. One that is trained on gives the part that
    is held out, any other one all its samples."""
    labels: Convention | None = None
    """In a dataset of your own, for a causal model of transformers: labels[t] is the token at t (`aligned`, as for transformers, which
    are moved by one), or the one after it (`next`); without it the samples show which."""
    text_field: str = "text"
    """Field of a JSON line or of a dataset row that holds the text; `doc.text` is one within another."""
    turns: Turns = "all"
    """Replies of a conversation that are learned: `all` in one document, `each` in a separate document that ends with it, or only the `last`."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    """Type of the numbers in a file of tokens."""
    image_size: Annotated[int, Field(ge=1, le=2**14)] = 224
    """`images:` only: pixels of a side; the shorter side is resized to it, and the middle is cut out."""
    image_channels: Literal[1, 3] = 3
    """`images:` only: 3 for colours, 1 for shades of grey."""
    image_mean: Annotated[tuple[float, ...], Field(min_length=1, max_length=3)] = (0.5,)
    """`images:` only: subtracted from pixels, which are 0 to 1: one number, or one for each channel."""
    image_std: Annotated[tuple[Annotated[float, Field(gt=0.0)], ...], Field(min_length=1, max_length=3)] = (0.5,)
    """`images:` only: pixels less the mean are divided by it."""
    augment: tuple[Literal["crop", "flip"], ...] = ()
    """`images:` only: changes of an image in training, drawn by (seed, step, sample): `crop` a random eighth off, `flip` left and right."""

    @model_validator(mode="after")
    def _channels_have_numbers(self) -> DataTable:
        for key, given in (("image_mean", self.image_mean), ("image_std", self.image_std)):
            if len(given) not in (1, self.image_channels):
                raise ValueError(
                    f"{key} has {len(given)} numbers, and images have {self.image_channels} "
                    f"channel{'s' * (self.image_channels > 1)}: 1 number works{', and so do 3' * (self.image_channels == 3)}"
                )
        if self.augment and not self.source.startswith("images:"):
            raise ValueError(
                f"augment changes the images of images:PATH, and source is {self.source!r}: a dataset of your own with a method "
                "sample(index, generator) works"
            )
        return self

    @property
    def is_text(self) -> bool:
        """Whether the samples are text that the tokenizer encodes."""
        texts = ("topics", "stdlib", "text", "jsonl", "parquet", "hf")
        return all(source.partition(":")[0] in texts for source in self.mixture or (self.source,))


class TrainTable(Table):
    """The training loop: the batch, the number of steps, the loss, and what is evaluated."""

    global_batch: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 32
    """Samples (sequences) of one step over all ranks and micro-batches."""
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 100
    """Optimizer steps of the whole run, over which the learning-rate schedule extends."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights, the order of samples and the dropout masks."""
    loss: str = "cross_entropy"
    """`cross_entropy` (next token, by `data.labels`, or class), `mse`, `model` (what the forward returns, given the labels), or
    `module:function` of (outputs, batch) -> (sum, count)."""
    loss_over: LossOver = "sample"
    """What the loss is given: `sample`, a part of the samples, over which it is a sum; or `batch`, the outputs and the batch of all
    samples of the step, as a contrastive loss needs, which may return the loss itself (`samestep.whole_batch`)."""
    evaluate_samples: Annotated[int, Field(ge=0, le=MOST_SAMPLES)] = 256
    """Number of held-out samples in the loss at the end; 0 skips it."""
    evaluate_every: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """Steps between evaluations of the held-out loss while the run trains; 0: only at the end."""
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Decay of the exponential moving averages of the weights, such as 0.999, which checkpoints hold; without it there are none."""
    evaluate_ema: bool = False
    """Whether held-out losses, and the samples that are generated, are those of the averages (`ema`) instead of the weights."""
    patience: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """Evaluations in a row without a new least loss after which the run ends; 0: it ends with its last step."""
    judged_by: str = ""
    """The set of `data.held_out_sets` whose loss decides about `patience` and `checkpoint.keep_best`; without it the part of the data
    that is held out, or where `data.held_out` is 0 the first set."""
    prompt: str = ""
    """Text that a generated sample begins with."""
    sample_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 200
    """Tokens of the text that is generated before and after training; 0 skips it."""
    sample_temperature: Annotated[float, Field(ge=0.0, le=MOST_SCALE)] = 0.8
    """Temperature of sampling; 0 takes the most likely token."""
    watch_every: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 100
    """Steps between checks: ranks agree, and a sample's forward and a weight's update, done again, are the same; 0: none but
    that of samples in the first step."""
    record: str = ""
    """Steps whose time is recorded op by op for `samestep explain`: `FIRST:LAST`, counted from 1, or a number of steps."""

    record_kernels: bool = False
    """Whether torch.profiler runs in recorded steps too, so that `samestep explain` shows the kernels of each block; they take longer then."""

    @field_validator("record", mode="before")
    @classmethod
    def _record_may_be_a_number(cls, given: Any) -> Any:
        return str(given) if isinstance(given, int) and not isinstance(given, bool) else given

    @field_validator("record")
    @classmethod
    def _record_is_steps(cls, text: str) -> str:
        if text and not (_STEPS.fullmatch(text) or re.fullmatch("[1-9][0-9]{0,5}", text)):
            raise ValueError(
                f"{text!r} names no steps: FIRST:LAST works, such as 100:104, and so does a number of steps"
            )
        if int(text.partition(":")[2] or MOST_STEPS) < int(text.partition(":")[0] or 0):
            raise ValueError(f"{text!r} ends before it begins: FIRST:LAST works, such as 100:104")
        return text


class NumericsTable(Table):
    """Precision and everything else in the arithmetic that may change a result."""

    rules: Literal[2] = RULES
    """Version of the rules by which words become numbers (`src/samestep/rules.py`); it is written into resolved jobs, and without it a
    run is of version 1."""
    precision: Precision = "float32"
    """Precision of weights and activations; bf16 and fp16 keep float32 master weights, gradients and reductions."""
    tf32: bool = False
    """Whether float32 matrix products on GPUs may use TF32."""
    deterministic: bool = False
    """Whether only kernels run that give the same bits each time; an operation that has none is refused by its name."""
    optimizer_states: OptimizerStates = "float32"
    """Precision in which the states of torch's optimizers are held: bf16 rounds at random, 8bit has scales by block."""
    compression: Compression = "none"
    """Encoding of gradients where `replicas` are summed: as they are, in half precision, in scaled blocks (int8, int4),
    the largest sixteenth of each block alone (topk), or each matrix as a product of two narrow ones (powersgd)."""
    compression_rank: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 4
    """With `compression = "powersgd"`: the rank to which the sum of each matrix is reduced."""
    replicas: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 1
    """With `compression` or `exchange_every`: the number of equal parts of the global batch, the gradient of each summed in full."""
    exchange_every: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 1
    """Above 1 each replica takes that many steps on separate weights and optimizer states, clipped by its norm, and then
    the moves of all replicas are averaged (local SGD, DiLoCo); held-out losses are those of the averaged weights."""
    outer_lr: Annotated[float, Field(gt=0.0, le=MOST_SCALE)] = 0.7
    """With `exchange_every`: the learning rate of the averaged moves; 1 with `outer_momentum = 0` averages weights (local SGD)."""
    outer_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """With `exchange_every`: the Nesterov momentum of the averaged moves (DiLoCo's paper has 0.9, for exchanges every few hundred steps)."""
    exchange_parts: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 1
    """With `exchange_every`: the number of parts of the weights, each of every so many layers, which are exchanged one after the
    other at equal distances (Streaming DiLoCo)."""
    exchange_delay: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """With `exchange_every`: the number of steps that replicas take between the start of an exchange and its outer step, which hide
    what is sent; at most `exchange_every` over `exchange_parts`."""
    exchange_mix: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """With `exchange_delay`: the fraction of its weights that a replica keeps where it continues with the outer ones, since these
    know nothing of its last steps."""
    coupled_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] | None = None
    """Samples of a group whose statistics batch norm takes, side by side in the order of samples; by default the global batch."""
    on_nonfinite: OnNonFinite = "stop"
    """Action when the loss or a gradient is not finite, after the module at fault has been named."""
    max_skipped: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 100
    """Number of steps in succession that may be skipped, those without a label that counts too; one more ends the run."""
    on_spike: OnSpike = "continue"
    """Action when a loss is above the mean of the last `spike_window` ones by more than `spike_deviations` standard deviations: skip
    the update, or also go back to the weights of the newest checkpoint and continue after the step."""
    spike_window: Annotated[int, Field(ge=10, le=MOST_STEPS)] = 100
    """With `on_spike`: the number of steps whose losses a loss is held against; before so many were taken none is a spike."""
    spike_deviations: Annotated[float, Field(gt=0.0, le=MOST_SCALE)] = 6.0
    """With `on_spike`: the standard deviations above the mean from which on a loss is a spike; each counts at least mean / 1000."""
    loss_scale: Annotated[float, Field(ge=1e-30, le=1e30)] = 65536.0
    """fp16 only: the initial loss scale; an overflow halves it and skips the step."""
    loss_scale_growth_steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 2000
    """fp16 only: number of steps without an overflow after which the loss scale doubles."""


class CheckpointTable(Table):
    """Checkpoints, the files from which a run resumes."""

    every: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """Steps between checkpoints; 0 writes only the last one."""
    keep: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 2
    """Number of newest checkpoints that are kept."""
    keep_every: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """Checkpoints whose step this divides are kept for ever; with 0 none is."""
    background: bool = False
    """Whether steps go on while a checkpoint is written; they wait only for a copy in the host's memory."""
    on_failure: Literal["continue", "stop"] = "continue"
    """Action when a checkpoint cannot be written, as on a full disk; the last one must be written in any case."""
    keep_best: bool = False
    """Whether RUN/best holds the checkpoint with the least held-out loss of all evaluations (`train.evaluate_every`)."""
    save_pretrained: bool = False
    """Whether each checkpoint also has a folder `pretrained`, which transformers' from_pretrained loads as it is."""


class RunTable(Table):
    """Settings of this machine; none of them changes a result."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device; auto takes GPUs if there are any."""
    folder: str | None = None
    """Folder in which paths and modules of the job are looked for before the working directory: that of the job file."""
    ranks: Annotated[int, Field(ge=1, le=MOST_RANKS)] | None = None
    """Number of worker processes; by default the layout's ranks, and without a layout all GPUs or 2."""
    threads: Annotated[int, Field(ge=1, le=MOST_THREADS)] = 1
    """Number of CPU threads of one worker."""
    data_workers: Annotated[int, Field(ge=0, le=MOST_THREADS)] = 0
    """Processes of each rank that read samples ahead; with 0 a thread does where reading takes long."""
    ranks_per_node: Annotated[int, Field(ge=1, le=MOST_RANKS)] | None = None
    """Number of ranks on one machine, for reduce=hierarchical; without it the number that the launcher gives."""
    timeout_s: Annotated[float, Field(ge=0.001, le=MOST_SECONDS)] = 600.0
    """Seconds that one collective may take before the run is aborted."""
    restarts: Annotated[int, Field(ge=0, le=MOST_THREADS)] = 0
    """Number of times that the workers are started again, from the newest checkpoint, after one of them failed."""
    hang_s: Annotated[float, Field(ge=0.001, le=MOST_SECONDS)] = 120.0
    """Seconds for which all ranks may stand still in a step after the first one, or 10 median steps, before they are ended; and for which one may not answer, in a save too."""
    compile: Literal["none", "blocks", "model"] = "none"
    """`blocks` runs each block as a graph of `torch.compile` in training forwards, and `model` the whole forward, in layouts
    whose ranks hold all weights; the first step compiles them."""
    compile_backend: str = "inductor"
    """Backend of `torch.compile` that makes the graphs: inductor, which fuses kernels, or another such as aot_eager."""
    compile_mode: CompileMode = "default"
    """`mode` of `torch.compile`, which inductor alone takes: reduce-overhead and max-autotune capture CUDA graphs, and both words
    with max-autotune measure kernels to choose the fastest."""
    attention: Literal["auto", "flash", "cudnn", "math", "efficient"] = "auto"
    """Kernel of attention, by torch's own switches: auto lets torch choose, another word takes that one or fails; CPUs have flash and math."""
    allow: tuple[Waiver | MayChange, ...] = ()
    """Refusals that are waived, by the word at the end of their text, and keys that a resume may change; summaries list them."""
    report: tuple[str, ...] = ()
    """Receivers of each step besides the run folder: `wandb`, `mlflow`, or `module:function` of (StepReport)."""
    log_every: Annotated[int, Field(ge=1, le=MOST_STEPS)] | None = None
    """Steps between logged steps; by default every step is logged, and 40 to 80 of them are printed."""
    profile: str = ""
    """Steps that are profiled, as `FIRST:LAST`: torch's trace of every rank, and on GPUs the history of its memory."""

    @field_validator("device", mode="before")
    @classmethod
    def _device_is_no_mps(cls, word: Any) -> Any:
        if word == "mps":
            raise ValueError(NO_MPS)
        return word

    @field_validator("report", mode="before")
    @classmethod
    def _report_may_be_one(cls, words: Any) -> Any:
        return (words,) if isinstance(words, str) and words else words or ()

    @field_validator("profile")
    @classmethod
    def _profile_is_a_range(cls, text: str) -> str:
        if text and not _STEPS.fullmatch(text):
            raise ValueError(f"{text!r} names no steps: FIRST:LAST works, such as 10:12, counted from 1")
        if text and int(text.partition(":")[2]) < int(text.partition(":")[0]):
            raise ValueError(f"{text!r} ends before it begins: FIRST:LAST works, such as 10:12")
        return text

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
            raise ValueError(
                f"compile_mode = {self.compile_mode!r} is for inductor, and compile_backend = {self.compile_backend!r} takes no mode: "
                "compile_backend = 'inductor' works, and so does compile_mode = 'default'"
            )
        return self

    @property
    def captures(self) -> bool:
        """Whether the compiler's mode captures CUDA graphs."""
        return self.compile_mode in WITHOUT_CUDA_GRAPHS

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

    def waived(self, waiver: Waiver, reason: str) -> str:
        """Note a refusal that `allow` waives, which every summary of the run then lists, and return its text.

        Raises:
            UnprovenError: it is not waived.
        """
        if waiver not in self.allow:
            raise UnprovenError(reason, waiver)
        text = f'{reason} (allowed by run.allow = ["{waiver}"])'
        if text not in self._met:
            self._met.append(text)
        return text
