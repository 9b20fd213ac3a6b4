"""The tables of a job as an editor and a type checker know them: `Job(train={"steps": 3})` is completed key by key.

Written by `python docs/job_keys.py` from `job_tables.py` and `optimizer_tables.py`, which check the values and say what each key means.
"""

from __future__ import annotations

from typing import Any, Literal, Required, TypedDict

from samestep.job_tables import CheckpointTable, DataTable, LoraTable, ModelTable, NumericsTable, RunTable, TrainTable
from samestep.optimizer_tables import GroupTable, OptimizerTable, ScheduleTable


class LoraKeys(TypedDict, total=False):
    """Keys of `LoraTable`."""

    targets: Required[list[str] | tuple[str, ...]]
    """Names of linear layers and embeddings, such as `q_proj`, or whole paths of some; or `all-linear`: all linear layers but the head."""
    r: int
    """Rank of the adapters."""
    alpha: float
    """The output of an adapter is multiplied by alpha / r."""
    dropout: float
    """Dropout rate of the input of an adapter."""
    modules_to_save: list[str] | tuple[str, ...]
    """Names of modules that are trained whole and saved with the adapters, such as `lm_head`."""
    base: Literal["full", "nf4"]
    """Weights of all linear layers but the head: `full` as they are, or `nf4`: rounded to 4 bits, and held and gathered so (QLoRA)."""


class GroupKeys(TypedDict, total=False):
    """Keys of `GroupTable`."""

    match: Required[list[str] | tuple[str, ...]]
    """Patterns of the names of the parameters, of which an earlier group has none."""
    name: str | None
    """A class of torch.optim that updates them, such as muon, or `module:function` of (parameters), which sets all of it; without it
    `optimizer.name`, with `optimizer.options`."""
    lr: float | None
    """Their learning rate after warm-up; without it `optimizer.lr`."""
    weight_decay: float | None
    """Their weight decay; without it `optimizer.weight_decay`, or none for what `optimizer.no_weight_decay` matches."""
    options: dict[str, Any]
    """Further keyword arguments of the class for them, such as betas."""


class ModelKeys(TypedDict, total=False):
    """Keys of `ModelTable`."""

    source: str
    """`hf:FAMILY`, `hf:PATH`, `module:function`, or `preset:NAME`."""
    config: dict[str, Any]
    """Fields of the family's, the folder's or the preset's configuration to override, or keyword arguments of the function."""
    task: Literal["causal", "masked", "seq2seq", "image", "speech", "vision-language"]
    """For `hf:`, the task of the model: `causal`, `masked`, `seq2seq`, `image`, `speech` or `vision-language`."""
    resize_embeddings: int | str | None
    """For a folder, the number of tokens of its embedding and its head: a number, `tokenizer` for at least those of
    `data.tokenizer`, or `tokenizer:64` for the next multiple of 64. New entries are drawn as in a new model."""
    freeze: list[str] | tuple[str, ...]
    """Patterns (`model.embed_tokens.*`, `*norm*`) of the names of parameters that are not trained."""
    stages: list[str] | tuple[str, ...]
    """Names of modules with which the later stages of a pipeline may begin, such as `["encoder.3", "head"]`; by default they begin
    with blocks, or in a model without a list of blocks with any module that it calls. Changes no result."""
    offload: list[str] | tuple[str, ...]
    """Names of modules whose weights take no gradient, such as `["reference"]`: they are in the host's memory, and on the device
    while a forward or a backward reads them. Changes no result."""
    lora: LoraKeys | LoraTable | None
    """Adapters by peft on some linear layers, all else frozen: `{ targets = ["q_proj", "v_proj"], r = 8, alpha = 16.0, dropout = 0.0,
    modules_to_save = [], base = "full" }`; with `base = "nf4"` the weights of all linear layers but the head are
    rounded to 4 bits, and held so (QLoRA)."""


class DataKeys(TypedDict, total=False):
    """Keys of `DataTable`."""

    source: str
    """topics, stdlib, text:PATH, tokens:PATH, jsonl:PATH, parquet:PATH, hf:PATH, digits, images:PATH, `module:function`, or mixture."""
    mixture: dict[str, float]
    """With `source = "mixture"`: sources, and the share of the samples that each one gives, in any unit."""
    tokenizer: str
    """`bytes`, or a folder that holds a tokenizer."""
    sequence_length: int
    """Tokens of a sample."""
    held_out: float
    """Fraction at the end of the data that is held out of training."""
    held_out_sets: dict[str, str]
    """Sources that are evaluated besides, by names of your own: `{ code = "text:PATH" }`. One that is trained on gives the part that
    is held out, any other one all its samples."""
    labels: Literal["aligned", "next"] | None
    """In a dataset of your own, for a causal model of transformers: labels[t] is the token at t (`aligned`, as for transformers, which
    are moved by one), or the one after it (`next`); without it the samples show which."""
    text_field: str
    """Field of a JSON line or of a dataset row that holds the text; `doc.text` is one within another."""
    turns: Literal["all", "last", "each"]
    """Replies of a conversation that are learned: `all` in one document, `each` in a separate document that ends with it, or only the `last`."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"]
    """Type of the numbers in a file of tokens."""
    image_size: int
    """`images:` only: pixels of a side; the shorter side is resized to it, and the middle is cut out."""
    image_channels: Literal[1, 3]
    """`images:` only: 3 for colours, 1 for shades of grey."""
    image_mean: list[float] | tuple[float, ...]
    """`images:` only: subtracted from pixels, which are 0 to 1: one number, or one for each channel."""
    image_std: list[float] | tuple[float, ...]
    """`images:` only: pixels less the mean are divided by it."""
    augment: list[Literal["crop", "flip"]] | tuple[Literal["crop", "flip"], ...]
    """`images:` only: changes of an image in training, drawn by (seed, step, sample): `crop` a random eighth off, `flip` left and right."""


class TrainKeys(TypedDict, total=False):
    """Keys of `TrainTable`."""

    global_batch: int
    """Samples (sequences) of one step over all ranks and micro-batches."""
    steps: int
    """Optimizer steps of the whole run, over which the learning-rate schedule extends."""
    seed: int
    """Seed of the initial weights, the order of samples and the dropout masks."""
    loss: str
    """`cross_entropy` (next token, by `data.labels`, or class), `mse`, `model` (what the forward returns, given the labels), or
    `module:function` of (outputs, batch) -> (sum, count)."""
    loss_over: Literal["sample", "batch"]
    """What the loss is given: `sample`, a part of the samples, over which it is a sum; or `batch`, the outputs and the batch of all
    samples of the step, as a contrastive loss needs, which may return the loss itself (`samestep.whole_batch`)."""
    evaluate_samples: int
    """Number of held-out samples in the loss at the end; 0 skips it."""
    evaluate_every: int
    """Steps between evaluations of the held-out loss while the run trains; 0: only at the end."""
    ema: float | None
    """Decay of the exponential moving averages of the weights, such as 0.999, which checkpoints hold; without it there are none."""
    evaluate_ema: bool
    """Whether held-out losses, and the samples that are generated, are those of the averages (`ema`) instead of the weights."""
    patience: int
    """Evaluations in a row without a new least loss after which the run ends; 0: it ends with its last step."""
    judged_by: str
    """The set of `data.held_out_sets` whose loss decides about `patience` and `checkpoint.keep_best`; without it the part of the data
    that is held out, or where `data.held_out` is 0 the first set."""
    prompt: str
    """Text that a generated sample begins with."""
    sample_tokens: int
    """Tokens of the text that is generated before and after training; 0 skips it."""
    sample_temperature: float
    """Temperature of sampling; 0 takes the most likely token."""
    watch_every: int
    """Steps between checks: ranks agree, and a sample's forward and a weight's update, done again, are the same; 0: none but
    that of samples in the first step."""
    record: str | int
    """Steps whose time is recorded op by op for `samestep explain`: `FIRST:LAST`, counted from 1, or a number of steps."""
    record_kernels: bool
    """Whether torch.profiler runs in recorded steps too, so that `samestep explain` shows the kernels of each block; they take longer then."""


class OptimizerKeys(TypedDict, total=False):
    """Keys of `OptimizerTable`."""

    name: str
    """A class of torch.optim in any case, or `module:function`."""
    lr: float
    """Learning rate after warm-up."""
    weight_decay: float
    """Weight decay of every parameter that `no_weight_decay` does not match."""
    no_weight_decay: list[str] | tuple[str, ...]
    """Patterns (`*norm*`, `*.bias`) of the names of parameters without weight decay."""
    groups: list[GroupKeys | GroupTable] | tuple[GroupKeys | GroupTable, ...]
    """Parameters with other settings, or with another class: `[{ match = ["*_proj.weight"], name = "muon", lr = 0.02,
    weight_decay = 0.0, options = {} }]`; without `name` they add to those of the optimizer."""
    clip_norm: float | None
    """Largest global gradient norm, above which gradients are clipped; without it nothing is clipped."""
    options: dict[str, Any]
    """Further keyword arguments of the class, such as betas."""


class ScheduleKeys(TypedDict, total=False):
    """Keys of `ScheduleTable`."""

    name: str
    """Shape after warm-up: `constant`, `linear`, `cosine`, `polynomial`, `wsd`, or `module:function` of (step, steps) -> factor."""
    warmup_steps: int
    """Number of steps of linear rise."""
    final_ratio: float
    """Learning rate at the last step, as a fraction of the peak."""
    power: float
    """`polynomial` only: the power to which the fraction of the decay that is left is raised."""
    decay_steps: int
    """`wsd` only (warm-up, stable, decay): number of last steps in which the learning rate falls, linearly."""


class NumericsKeys(TypedDict, total=False):
    """Keys of `NumericsTable`."""

    rules: Literal[2]
    """Version of the rules by which words become numbers (`src/samestep/rules.py`); it is written into resolved jobs, and without it a
    run is of version 1."""
    precision: Literal["float64", "float32", "bf16", "fp16"]
    """Precision of weights and activations; bf16 and fp16 keep float32 master weights, gradients and reductions."""
    tf32: bool
    """Whether float32 matrix products on GPUs may use TF32."""
    deterministic: bool
    """Whether only kernels run that give the same bits each time; an operation that has none is refused by its name."""
    optimizer_states: Literal["float32", "bf16", "8bit"]
    """Precision in which the states of torch's optimizers are held: bf16 rounds at random, 8bit has scales by block."""
    compression: Literal["none", "bf16", "fp16", "int8", "int4", "topk", "powersgd"]
    """Encoding of gradients where `replicas` are summed: as they are, in half precision, in scaled blocks (int8, int4),
    the largest sixteenth of each block alone (topk), or each matrix as a product of two narrow ones (powersgd)."""
    compression_rank: int
    """With `compression = "powersgd"`: the rank to which the sum of each matrix is reduced."""
    replicas: int
    """With `compression` or `exchange_every`: the number of equal parts of the global batch, the gradient of each summed in full."""
    exchange_every: int
    """Above 1 each replica takes that many steps on separate weights and optimizer states, clipped by its norm, and then
    the moves of all replicas are averaged (local SGD, DiLoCo); held-out losses are those of the averaged weights."""
    outer_lr: float
    """With `exchange_every`: the learning rate of the averaged moves; 1 with `outer_momentum = 0` averages weights (local SGD)."""
    outer_momentum: float
    """With `exchange_every`: the Nesterov momentum of the averaged moves (DiLoCo's paper has 0.9, for exchanges every few hundred steps)."""
    exchange_parts: int
    """With `exchange_every`: the number of parts of the weights, each of every so many layers, which are exchanged one after the
    other at equal distances (Streaming DiLoCo)."""
    exchange_delay: int
    """With `exchange_every`: the number of steps that replicas take between the start of an exchange and its outer step, which hide
    what is sent; at most `exchange_every` over `exchange_parts`."""
    exchange_mix: float
    """With `exchange_delay`: the fraction of its weights that a replica keeps where it continues with the outer ones, since these
    know nothing of its last steps."""
    coupled_samples: int | None
    """Samples of a group whose statistics batch norm takes, side by side in the order of samples; by default the global batch."""
    on_nonfinite: Literal["skip", "stop", "continue"]
    """Action when the loss or a gradient is not finite, after the module at fault has been named."""
    max_skipped: int
    """Number of steps in succession that may be skipped, those without a label that counts too; one more ends the run."""
    on_spike: Literal["continue", "skip", "rollback"]
    """Action when a loss is above the mean of the last `spike_window` ones by more than `spike_deviations` standard deviations: skip
    the update, or also go back to the weights of the newest checkpoint and continue after the step."""
    spike_window: int
    """With `on_spike`: the number of steps whose losses a loss is held against; before so many were taken none is a spike."""
    spike_deviations: float
    """With `on_spike`: the standard deviations above the mean from which on a loss is a spike; each counts at least mean / 1000."""
    loss_scale: float
    """fp16 only: the initial loss scale; an overflow halves it and skips the step."""
    loss_scale_growth_steps: int
    """fp16 only: number of steps without an overflow after which the loss scale doubles."""


class CheckpointKeys(TypedDict, total=False):
    """Keys of `CheckpointTable`."""

    every: int
    """Steps between checkpoints; 0 writes only the last one."""
    keep: int
    """Number of newest checkpoints that are kept."""
    keep_every: int
    """Checkpoints whose step this divides are kept for ever; with 0 none is."""
    background: bool
    """Whether steps go on while a checkpoint is written; they wait only for a copy in the host's memory."""
    on_failure: Literal["continue", "stop"]
    """Action when a checkpoint cannot be written, as on a full disk; the last one must be written in any case."""
    keep_best: bool
    """Whether RUN/best holds the checkpoint with the least held-out loss of all evaluations (`train.evaluate_every`)."""
    save_pretrained: bool
    """Whether each checkpoint also has a folder `pretrained`, which transformers' from_pretrained loads as it is."""


class RunKeys(TypedDict, total=False):
    """Keys of `RunTable`."""

    device: Literal["auto", "cpu", "cuda"]
    """Kind of device; auto takes GPUs if there are any."""
    folder: str | None
    """Folder in which paths and modules of the job are looked for before the working directory: that of the job file."""
    ranks: int | None
    """Number of worker processes; by default the layout's ranks, and without a layout all GPUs or 2."""
    threads: int
    """Number of CPU threads of one worker."""
    data_workers: int
    """Processes of each rank that read samples ahead; with 0 a thread does where reading takes long."""
    ranks_per_node: int | None
    """Number of ranks on one machine, for reduce=hierarchical; without it the number that the launcher gives."""
    timeout_s: float
    """Seconds that one collective may take before the run is aborted."""
    restarts: int
    """Number of times that the workers are started again, from the newest checkpoint, after one of them failed."""
    hang_s: float
    """Seconds for which all ranks may stand still in a step after the first one, or 10 median steps, before they are ended; and for which one may not answer, in a save too."""
    compile: Literal["none", "blocks", "model"]
    """`blocks` runs each block as a graph of `torch.compile` in training forwards, and `model` the whole forward, in layouts
    whose ranks hold all weights; the first step compiles them."""
    compile_backend: str
    """Backend of `torch.compile` that makes the graphs: inductor, which fuses kernels, or another such as aot_eager."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    """`mode` of `torch.compile`, which inductor alone takes: reduce-overhead and max-autotune capture CUDA graphs, and both words
    with max-autotune measure kernels to choose the fastest."""
    attention: Literal["auto", "flash", "cudnn", "math", "efficient"]
    """Kernel of attention, by torch's own switches: auto lets torch choose, another word takes that one or fails; CPUs have flash and math."""
    allow: (
        list[
            Literal["samples", "loss", "random", "state", "optimizer", "data", "build", "resume"]
            | Literal[
                "optimizer.lr",
                "optimizer.weight_decay",
                "optimizer.clip_norm",
                "optimizer.no_weight_decay",
                "schedule.name",
                "schedule.warmup_steps",
                "schedule.final_ratio",
                "train.global_batch",
                "data.source",
                "data.mixture",
                "data.tokenizer",
            ]
        ]
        | tuple[
            Literal["samples", "loss", "random", "state", "optimizer", "data", "build", "resume"]
            | Literal[
                "optimizer.lr",
                "optimizer.weight_decay",
                "optimizer.clip_norm",
                "optimizer.no_weight_decay",
                "schedule.name",
                "schedule.warmup_steps",
                "schedule.final_ratio",
                "train.global_batch",
                "data.source",
                "data.mixture",
                "data.tokenizer",
            ],
            ...,
        ]
    )
    """Refusals that are waived, by the word at the end of their text, and keys that a resume may change; summaries list them."""
    report: list[str] | tuple[str, ...] | str
    """Receivers of each step besides the run folder: `wandb`, `mlflow`, or `module:function` of (StepReport)."""
    log_every: int | None
    """Steps between logged steps; by default every step is logged, and 40 to 80 of them are printed."""
    profile: str
    """Steps that are profiled, as `FIRST:LAST`: torch's trace of every rank, and on GPUs the history of its memory."""


class LayoutKeys(TypedDict, total=False):
    """Words of a `Layout`."""

    dp: int
    dp_replicate: int
    dp_shard: int
    tp: int
    sequence_parallel: bool
    cp: int
    exchange: Literal["auto", "heads", "ring", "hybrid"]
    pp: int
    ep: int
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
    virtual_stages: int
    zero: Literal[0, 1, 2, 3]
    microbatch: int | None
    loss_chunk: int | None
    mlp_chunk: int | None
    recompute: Literal["none", "selective", "alternate", "full", "offload"]
    accumulate: Literal["sharded", "full"]
    reduce: Literal["ring", "hierarchical", "root"]
    offload: bool


class JobKeys(TypedDict, total=False):
    """Tables of `Job`."""

    model: ModelKeys | ModelTable
    data: DataKeys | DataTable
    train: TrainKeys | TrainTable
    optimizer: OptimizerKeys | OptimizerTable
    schedule: ScheduleKeys | ScheduleTable
    numerics: NumericsKeys | NumericsTable
    layout: LayoutKeys
    checkpoint: CheckpointKeys | CheckpointTable
    run: RunKeys | RunTable
