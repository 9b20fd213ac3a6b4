"""The tables of a job as an editor and a type checker know them: `Job(train={"steps": 3})` is completed key by key.

Written by `python docs/job_keys.py` from `job_tables.py` and `optimizer_tables.py`, which check the values and say what each key means.
A type checker reads this stub; nothing imports it at run time.
"""

from __future__ import annotations

from typing import Any, Literal, Required, TypedDict

from samestep.job_tables import CheckpointTable, DataTable, LoraTable, ModelTable, NumericsTable, RunTable, TrainTable
from samestep.layout import Layout
from samestep.optimizer_tables import GroupTable, OptimizerTable, ScheduleTable

class LoraKeys(TypedDict, total=False):
    """Keys of `LoraTable`."""

    targets: Required[list[str] | tuple[str, ...]]
    """Names of linear layers and embeddings, such as `q_proj`, or full paths; or `all-linear`: all linear layers except the head."""
    r: int
    """Rank of the adapters."""
    alpha: float
    """The output of an adapter is multiplied by alpha / r."""
    dropout: float
    """Dropout rate of the input of an adapter."""
    modules_to_save: list[str] | tuple[str, ...]
    """Names of modules that are fully trained and saved with the adapters, such as `lm_head`."""
    base: Literal["full", "nf4"]
    """Storage of the weights of all linear layers except the head: `full` is unchanged; `nf4` rounds them to 4 bits, and stores and gathers them in 4 bits (QLoRA)."""

class GroupKeys(TypedDict, total=False):
    """Keys of `GroupTable`."""

    match: Required[list[str] | tuple[str, ...]]
    """Patterns of the names of the parameters. A parameter belongs to the first group that matches."""
    name: str | None
    """Optimizer of the group: a class of torch.optim, such as muon, or `module:function` of (parameters), which makes all settings; by
    default `optimizer.name` with `optimizer.options`."""
    lr: float | None
    """Learning rate after warm-up; by default `optimizer.lr`."""
    weight_decay: float | None
    """Weight decay; by default `optimizer.weight_decay`, or 0 for parameters that `optimizer.no_weight_decay` matches."""
    options: dict[str, Any]
    """More keyword arguments of the optimizer, such as betas."""

class ModelKeys(TypedDict, total=False):
    """Keys of `ModelTable`."""

    source: str
    """`hf:FAMILY`, `hf:PATH`, `module:function`, or `preset:NAME`; a run in a loop of one's own needs none."""
    config: dict[str, Any]
    """Overrides of fields of the configuration (of the family, the folder or the preset), or keyword arguments of the function."""
    task: Literal["causal", "masked", "seq2seq", "image", "speech", "vision-language"]
    """`hf:` only: the task of the model: `causal`, `masked`, `seq2seq`, `image`, `speech` or `vision-language`."""
    resize_embeddings: int | str | None
    """`hf:PATH` only: the size of the token embedding and the head: a number, `tokenizer` for at least the size of
    `data.tokenizer`, or `tokenizer:64` for the next multiple of 64. New rows are initialized as in a new model."""
    freeze: list[str] | tuple[str, ...]
    """Patterns of the names of frozen parameters, such as `model.embed_tokens.*` or `*norm*`."""
    stages: list[str] | tuple[str, ...]
    """Names of modules that may begin a pipeline stage, such as `["encoder.3", "head"]`. By default every block may begin a stage;
    in a model without a list of blocks, every module that it calls. Does not affect the result."""
    offload: list[str] | tuple[str, ...]
    """Parameter offloading of frozen modules, such as `["reference"]`: their weights are in CPU memory, and on the device only
    while a forward or backward pass reads them. Does not affect the result."""
    lora: LoraKeys | LoraTable | None
    """LoRA adapters by peft on some linear layers; everything else is frozen: `{ targets = ["q_proj", "v_proj"], r = 8, alpha = 16.0,
    dropout = 0.0, modules_to_save = [], base = "full" }`. With `base = "nf4"` the weights of all linear layers except the head are
    stored in 4 bits (QLoRA)."""

class DataKeys(TypedDict, total=False):
    """Keys of `DataTable`."""

    source: str
    """The source of the data: topics, stdlib, text:PATH, tokens:PATH, jsonl:PATH, parquet:PATH, hf:PATH, digits, images:PATH,
    `module:function`, or mixture."""
    mixture: dict[str, float]
    """With `source = "mixture"`: the sources, each with its weight in the mixture, in any unit."""
    tokenizer: str
    """`bytes`, or a folder with a tokenizer."""
    sequence_length: int
    """Number of tokens in a sample."""
    held_out: float
    """Fraction of the data, from its end, that is the validation set: it is not trained on."""
    held_out_sets: dict[str, str]
    """More validation sets, by names that you choose: `{ code = "text:PATH" }`. A source that is also trained on contributes its
    held-out fraction; any other source contributes all its samples."""
    labels: Literal["aligned", "next"] | None
    """Your own dataset with a causal transformers model only: `aligned` if labels[t] is the token at t (the model shifts them), `next` if
    it is the token after t. By default this is detected from the samples."""
    text_field: str
    """Name of the field with the text, in a JSON line or a dataset row; `doc.text` is a nested field."""
    turns: Literal["all", "last", "each"]
    """Replies of a conversation that are trained on: `all` in one document, `each` in a document that ends with the reply, or only the `last`."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"]
    """Data type of the numbers in a token file."""
    image_size: int
    """`images:` only: height and width in pixels. The shorter side is resized to it, then the center is cropped."""
    image_channels: Literal[1, 3]
    """`images:` only: 3 for colour, 1 for greyscale."""
    image_mean: list[float] | tuple[float, ...]
    """`images:` only: mean that is subtracted from the pixels (0 to 1): one number, or one for each channel."""
    image_std: list[float] | tuple[float, ...]
    """`images:` only: standard deviation that pixels are divided by, after the mean is subtracted."""
    augment: list[Literal["crop", "flip"]] | tuple[Literal["crop", "flip"], ...]
    """`images:` only: random augmentation in training, seeded by (seed, step, sample): `crop` removes up to an eighth, `flip` mirrors left and right."""

class TrainKeys(TypedDict, total=False):
    """Keys of `TrainTable`."""

    global_batch: int
    """Global batch size: samples (sequences) per step, over all ranks and micro-batches."""
    steps: int
    """Number of optimizer steps of the run. The learning-rate schedule extends over them."""
    seed: int
    """Seed of the initial weights, the order of samples, and the dropout masks."""
    loss: str
    """`cross_entropy` (next token, see `data.labels`, or class), `mse`, `model` (the loss that the forward pass returns, given the
    labels), or `module:function` of (outputs, batch) -> (sum, count)."""
    loss_over: Literal["sample", "batch"]
    """Scope of the loss function. `sample`: it is called with some samples and returns a sum over them. `batch`: it is called with the
    outputs and the batch of the full step, as contrastive losses need, and may return the loss itself (`samestep.whole_batch`)."""
    evaluate_samples: int
    """Number of validation samples in an evaluation; 0 turns evaluation off."""
    evaluate_every: int
    """Steps between evaluations of the validation loss; 0 evaluates only at the end."""
    ema: float | None
    """Decay of the exponential moving averages of the weights (EMA), such as 0.999. Checkpoints contain them. By default there are none."""
    evaluate_ema: bool
    """Whether evaluation and generation use the averages (`ema`) instead of the weights."""
    patience: int
    """Early stopping: the run ends after this many evaluations without a new best validation loss; 0 turns it off."""
    monitor: str
    """Validation set that `patience` and `checkpoint.keep_best` monitor, a name of `data.held_out_sets`. By default the held-out
    fraction of the data; if `data.held_out` is 0, the first set."""
    prompt: str
    """Prompt of the generated text."""
    sample_tokens: int
    """Number of tokens to generate when a run resumes and when its last step is done; 0 turns it off."""
    sample_temperature: float
    """Sampling temperature; 0 takes the most likely token."""
    watch_every: int
    """Steps between self-checks: ranks are compared, and the forward pass of a sample and the update of a weight are repeated and
    compared. 0: only the check of samples in the first step."""
    record: str | int
    """Steps to record, operation by operation, for `samestep explain`: `FIRST:LAST`, counted from 1, or a number of steps."""

class OptimizerKeys(TypedDict, total=False):
    """Keys of `OptimizerTable`."""

    name: str
    """A class of torch.optim, in upper or lower case, or `module:function`."""
    lr: float
    """Learning rate after warm-up."""
    weight_decay: float
    """Weight decay of every parameter that `no_weight_decay` does not match."""
    no_weight_decay: list[str] | tuple[str, ...]
    """Patterns of the names of parameters without weight decay, such as `*norm*` or `*.bias`."""
    groups: list[GroupKeys | GroupTable] | tuple[GroupKeys | GroupTable, ...]
    """Parameter groups with other settings or another optimizer: `[{ match = ["*_proj.weight"], name = "muon", lr = 0.02,
    weight_decay = 0.0, options = {} }]`. Without `name` a group changes the settings of the main optimizer."""
    clip_norm: float | None
    """Maximum global gradient norm for clipping; by default gradients are not clipped."""
    options: dict[str, Any]
    """More keyword arguments of the optimizer, such as betas."""

class ScheduleKeys(TypedDict, total=False):
    """Keys of `ScheduleTable`."""

    name: str
    """Shape after warm-up: `constant`, `linear`, `cosine`, `polynomial`, `wsd`, or `module:function` of (step, steps) -> factor."""
    warmup_steps: int
    """Number of steps of linear warm-up."""
    final_ratio: float
    """Learning rate at the last step, as a fraction of the peak."""
    power: float
    """`polynomial` only: exponent of the decay."""
    decay_steps: int
    """`wsd` only (warm-up, stable, decay): number of steps of linear decay at the end."""

class NumericsKeys(TypedDict, total=False):
    """Keys of `NumericsTable`."""

    rules: Literal[2]
    """Version of the numerics rules (`src/samestep/rules.py`), written into resolved jobs. A resumed run without it has version 1."""
    precision: Literal["float64", "float32", "bf16", "fp16"]
    """Precision of weights and activations. bf16 and fp16 (mixed precision) keep float32 master weights, gradients and reductions."""
    tf32: bool
    """Whether float32 matmuls on GPUs may use TF32."""
    deterministic: bool
    """Whether to use deterministic kernels only. An operation without one raises an error that names it."""
    optimizer_states: Literal["float32", "8bit"]
    """Precision of the optimizer states of torch's optimizers: 8bit has one scale for each block."""
    compression: Literal["none", "bf16", "int8", "powersgd"]
    """Encoding of gradients where `replicas` are summed. "int8" has a scale for each block, and "powersgd" sends each matrix as a
    product of two narrow ones."""
    compression_rank: int
    """With `compression = "powersgd"`: rank of the low-rank approximation of each gradient matrix."""
    replicas: int
    """With `compression` or `exchange_every`: number of equal parts of the global batch. Within a part, gradients are reduced uncompressed."""
    exchange_every: int
    """DiLoCo and local SGD: steps between synchronizations of the replicas. If above 1, each replica trains its own weights and optimizer
    states, clipped by its own norm; then the changes of all replicas are averaged. Validation uses the averaged weights."""
    outer_lr: float
    """With `exchange_every`: learning rate of the outer optimizer; 1 with `outer_momentum = 0` averages weights (local SGD)."""
    outer_momentum: float
    """With `exchange_every`: Nesterov momentum of the outer optimizer. The DiLoCo paper uses 0.9, with a few hundred steps between synchronizations."""
    batch_norm_group: int | None
    """Batch-norm group size: number of consecutive samples that share batch-norm statistics, as in SyncBatchNorm; by default the global batch."""
    on_nonfinite: Literal["skip", "stop", "continue"]
    """Action if the loss or a gradient is not finite. The log names the module at fault."""
    max_skipped: int
    """Number of consecutive steps that may be skipped, including steps without a valid label; one more ends the run."""
    on_spike: Literal["continue", "skip", "rollback"]
    """Action if a loss exceeds the mean of the last `spike_window` losses by more than `spike_deviations` standard deviations. `skip` skips
    the update; `rollback` also loads the weights of the newest checkpoint and continues after the step."""
    spike_window: int
    """With `on_spike`: number of previous losses in the mean. No earlier loss is a spike."""
    spike_deviations: float
    """With `on_spike`: standard deviations above the mean that make a loss a spike. A standard deviation counts as at least mean / 1000."""
    loss_scale: float
    """fp16 only: initial loss scale. An overflow halves it and skips the step."""
    loss_scale_growth_steps: int
    """fp16 only: steps without an overflow before the loss scale doubles."""

class CheckpointKeys(TypedDict, total=False):
    """Keys of `CheckpointTable`."""

    every: int
    """Steps between checkpoints; 0 writes only the last one."""
    keep: int
    """Number of newest checkpoints to keep."""
    keep_every: int
    """Keep the checkpoint of every N-th step permanently; 0 keeps none."""
    background: bool
    """Whether training continues while a checkpoint is written (asynchronous checkpoints); it waits only for a copy to CPU memory."""
    on_failure: Literal["continue", "stop"]
    """Action if a checkpoint cannot be written, for example on a full disk. The last checkpoint must always be written."""
    keep_best: bool
    """Whether to keep the checkpoint with the best validation loss in RUN/best (see `train.evaluate_every`)."""
    save_pretrained: bool
    """Whether each checkpoint also has a folder `pretrained` for from_pretrained of transformers."""

class RunKeys(TypedDict, total=False):
    """Keys of `RunTable`."""

    device: Literal["auto", "cpu", "cuda"]
    """Kind of device; auto uses GPUs if there are any."""
    folder: str | None
    """Folder that is searched for the paths and modules of the job, before the working directory; by default the folder of the job file."""
    ranks: int | None
    """Number of worker processes; by default the ranks of the layout, or without a layout all GPUs, or 2."""
    threads: int
    """Number of CPU threads per worker."""
    data_workers: int
    """Number of data-loading processes per rank; with 0, a thread reads ahead if reading is slow."""
    ranks_per_node: int | None
    """Number of ranks per node, for reduce=hierarchical; by default the number given by the launcher."""
    timeout_s: float
    """Timeout of a collective in seconds. After it, the run is aborted."""
    restarts: int
    """Number of restarts from the newest checkpoint after a worker failed."""
    hang_s: float
    """Hang timeout in seconds, or 10 median steps if that is longer: the run ends if all ranks stand still in a step after the first one. It is
    also the timeout for an unresponsive rank, including while it saves."""
    compile: Literal["none", "blocks"]
    """`torch.compile` in training: `blocks` compiles each block. The first step compiles."""
    compile_backend: str
    """Backend of `torch.compile`: inductor, or another one such as aot_eager."""
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"]
    """`mode` of `torch.compile`, for inductor only. max-autotune-no-cudagraphs benchmarks kernels and uses the fastest."""
    attention: Literal["auto", "flash", "cudnn", "math", "efficient"]
    """Attention kernel of torch: auto lets torch choose; another value uses that kernel or raises an error. CPUs have flash and math."""
    allow: (
        list[
            Literal["samples", "loss", "random", "state", "optimizer", "data", "build", "resume", "memory"]
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
            Literal["samples", "loss", "random", "state", "optimizer", "data", "build", "resume", "memory"]
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
    """Checks to skip, by the name at the end of their error text, and keys that may differ from the checkpoint. Summaries list them."""
    report: list[str] | tuple[str, ...] | str
    """Loggers of each step, in addition to the run folder: `wandb`, `mlflow`, or `module:function` of (StepReport)."""
    log_every: int | None
    """Steps between log lines; by default every step is logged, and 40 to 80 of them are printed."""
    profile: str
    """Steps to profile with torch.profiler, as `FIRST:LAST`: a trace of every rank, and on GPUs the memory history."""

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
    layout: LayoutKeys | Layout | str
    checkpoint: CheckpointKeys | CheckpointTable
    run: RunKeys | RunTable
