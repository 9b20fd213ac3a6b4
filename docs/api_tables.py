"""The tables of docs/python-api.md, from the signatures and docstrings of what is public."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import samestep
from samestep.runtime.run import Run
from samestep.runtime.step_report import StepReport

LONGEST = 24
"""The most characters of a default that are shown."""
MADE_BY_USERS = ("EarlyStopping", "Job", "Layout")
"""Classes that a program calls; objects of the other ones are results of functions."""


def functions() -> str:
    """Every public function and class of `samestep`, but its errors."""
    return _table("name", ((_name(name), getattr(samestep, name)) for name in public_names()))


def errors() -> str:
    """Every public error."""
    kinds = [name for name in samestep.__all__ if _is_error(getattr(samestep, name))]
    return "\n".join(
        ["| error | when |", "| --- | --- |", *(f"| `{name}` | {_text(getattr(samestep, name))} |" for name in kinds)]
    )


def run_methods() -> str:
    """Every method and property of a run."""
    return _table("of a run", ((f"run.{name}", getattr(Run, name)) for name in public_methods()))


def report_fields() -> str:
    """Every field of a StepReport."""
    lines = ["| field | type | what it is |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | `{kind}` | {text} |" for name, kind, text in fields_of(StepReport))])


def public_names() -> list[str]:
    return [name for name in samestep.__all__ if not _is_error(getattr(samestep, name))]


def public_methods() -> list[str]:
    return [*dict.fromkeys(name for kind in Run.__mro__[:-1] for name in vars(kind) if not name.startswith("_"))]


def fields_of(kind: type) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the type and the text behind each field of a dataclass."""
    (node,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(node, ast.ClassDef)
    for one, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(one, ast.AnnAssign):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            yield ast.unparse(one.target), ast.unparse(one.annotation).replace("|", "\\|"), " ".join(str(text).split())


def _table(word: str, rows: Iterator[tuple[str, Any]]) -> str:
    lines = [f"| {word} | what it does |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}{_arguments(value)}` | {_text(value)} |" for name, value in rows)])


def _name(name: str) -> str:
    return f"samestep.{name}"


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _arguments(value: Any) -> str:
    """Return the names of a function's arguments with their defaults, without types."""
    if isinstance(value, property) or (isinstance(value, type) and value.__name__ not in MADE_BY_USERS):
        return ""
    found = []
    for one in inspect.signature(value).parameters.values():
        short = one.default if len(repr(one.default)) <= LONGEST else _Dots()
        if one.name != "self":
            found.append(one.replace(annotation=inspect.Parameter.empty, default=short))
    return str(inspect.Signature(found)).replace("|", "\\|")


class _Dots:
    """A default that is not shown."""

    def __repr__(self) -> str:
        return "..."


def _text(value: Any) -> str:
    """Return the paragraphs of a docstring in front of its sections, as one line."""
    doc = inspect.getdoc(value.fget if isinstance(value, property) else value) or ""
    doc = re.split(r"\n(?:Args|Returns|Raises|Yields):\n|\n\nCollective over|\n```", doc)[0]
    return " ".join(doc.split()).replace("|", "\\|").replace("<", "&lt;")


NEAREST = {
    "CheckpointError": "`torch.distributed.checkpoint.api.CheckpointException`",
    "DataError": "`ValueError` of `torch.utils.data.DataLoader`",
    "DriftError": "None",
    "InputError": "`ValueError`",
    "JobError": "`pydantic.ValidationError`",
    "LayoutError": "`ValueError` of `accelerate.ParallelismConfig`",
    "ModelError": "`RuntimeError` of `torch.nn.Module`",
    "NonFiniteError": "`RuntimeError` of `torch.autograd.detect_anomaly`",
    "OutOfMemoryError": "`torch.OutOfMemoryError`",
    "RecordError": "None",
    "RepeatError": "`torch.utils.checkpoint.CheckpointError`",
    "RunError": "`RuntimeError`",
    "SamestepError": "`Exception`",
    "SaveError": "`OSError`",
    "SpikeError": "None",
    "UnprovenError": "None",
    "WorkerError": "`torch.distributed.elastic.multiprocessing.errors.ChildFailedError`",
    "CheckpointTable": "`save_*` of `transformers.TrainingArguments`, `accelerate.ProjectConfiguration`",
    "DataTable": "`accelerate.DataLoaderConfiguration`",
    "ModelTable": "`transformers.PretrainedConfig`, `peft.LoraConfig`",
    "NumericsTable": "`torch.distributed.fsdp.MixedPrecisionPolicy`",
    "OptimizerTable": "Arguments of `torch.optim.AdamW`",
    "RunTable": "Arguments of `torchrun`, `accelerate.ProfileKwargs`",
    "ScheduleTable": "`transformers.get_scheduler`",
    "TrainTable": "`transformers.TrainingArguments`",
    "Batch": "A batch of `torch.utils.data.DataLoader`",
    "EarlyStopping": "`transformers.EarlyStoppingCallback`",
    "Hardware": "None",
    "Job": "`transformers.TrainingArguments`, `accelerate.Accelerator(...)`",
    "Layout": "`accelerate.ParallelismConfig`, `torch.distributed.device_mesh.init_device_mesh`",
    "Plan": "None",
    "Prediction": "None",
    "Run": "The result of `Accelerator.prepare`; `transformers.Trainer`",
    "StepReport": "`logs` of `TrainerCallback.on_log`",
    "Verdict": "None",
    "after_step": "`torch.optim.Optimizer.register_step_post_hook`",
    "batch_cat": "`Accelerator.gather`, `torch.distributed.nn.functional.all_gather`",
    "batch_mean": "`Accelerator.reduce(x, 'mean')`",
    "batch_sum": "`Accelerator.reduce(x, 'sum')`, `torch.distributed.nn.functional.all_reduce`",
    "batches": "`torch.utils.data.DistributedSampler`, `Accelerator.prepare(loader)`",
    "benchmark_hardware": "`nccl-tests`",
    "benchmark_layouts": "None",
    "calibrate": "None",
    "doctor": "`accelerate env`, `accelerate test`",
    "evaluate": "`Trainer.evaluate`",
    "explain": "`torch.profiler.profile`",
    "export": "`PreTrainedModel.save_pretrained`, `accelerate merge-weights`",
    "independent": "None",
    "inspect": "`accelerate estimate-memory`",
    "latest": "`transformers.trainer_utils.get_last_checkpoint`",
    "launch": "`accelerate launch`, `accelerate.notebook_launcher`, `torchrun`",
    "layouts": "None",
    "load": "`transformers.HfArgumentParser.parse_yaml_file`",
    "mean_over": "`reduction='mean'` of `torch.nn` losses",
    "model_loss": "`model(**batch).loss` in transformers",
    "parallelize": "`Accelerator.prepare`, `DistributedDataParallel`, `fully_shard`",
    "plan": "None",
    "ray_worker": "`ray.train.torch.TorchTrainer`",
    "sample": "`GenerationMixin.generate`",
    "simulate": "None",
    "track": "`Accelerator.init_trackers`, `transformers.TrainerCallback`",
    "train": "`Trainer.train`",
    "verify": "None",
    "whole_batch": "`ClipLoss(gather_with_grad=True)` of open_clip",
    "write_submission": "None",
}
"""The nearest counterpart of each public name in torch, Accelerate or transformers."""
_OF_RUN = {
    "averaged": "`torch.optim.swa_utils.AveragedModel`",
    "backward": "`Accelerator.backward`",
    "evaluate": "`Trainer.evaluate`",
    "gathered": "`FullyShardedDataParallel.summon_full_params`",
    "gradients": "`param.grad`",
    "load": "`Accelerator.load_state`",
    "load_state_dict": "`torch.distributed.checkpoint.state_dict.set_model_state_dict`",
    "predict": "`Trainer.predict`",
    "release": "`Accelerator.unwrap_model`",
    "save": "`Accelerator.save_state`",
    "save_pretrained": "`PreTrainedModel.save_pretrained`",
    "state_dict": "`Accelerator.get_state_dict`",
    "step": "`Accelerator.backward`, `clip_grad_norm_`, `optimizer.step` and `zero_grad`",
    "update": "`optimizer.step`",
    "zero_grad": "`optimizer.zero_grad`",
}
"""The same for methods of a run that have one."""


def counterparts() -> str:
    """Every public name, what it is, and its nearest counterpart."""
    lines = ["| name | what it is | nearest counterpart |", "| --- | --- | --- |"]
    lines += [
        f"| `samestep.{name}` | {_first(getattr(samestep, name))} | {NEAREST[name]} |" for name in samestep.__all__
    ]
    return "\n".join(
        [*lines, *(f"| `run.{name}` | {_first(getattr(Run, name))} | {near} |" for name, near in _OF_RUN.items())]
    )


def _first(value: Any) -> str:
    """Return the first sentence of a docstring."""
    return re.split(r"(?<=\.) |; |: (?=[a-zA-Z`])", _text(value))[0].rstrip(".:;") + "."


TABLES: dict[str, Callable[[], str]] = {
    "api_functions": functions,
    "api_errors": errors,
    "api_run": run_methods,
    "api_report": report_fields,
    "api_counterparts": counterparts,
}
