"""The batch with which a preset's model was trained, and the job that plans a preset as its authors trained it. No torch.

A preset is planned in bf16 with the published number of tokens of a step, unless the job gives a precision or a batch:
float32 and a small batch, the defaults of a job that trains here, would plan a run that nobody makes.
"""

from __future__ import annotations

from samestep.job import Job
from samestep.models.presets import DECODERS, PRESETS, preset
from samestep.output.text import align_columns

USUAL_TOKENS = 4 * 2**20
"""Tokens of a step where none are published: as many as in LLaMA and Llama 2."""
_MILLION = 2**20
TOKENS: dict[str, int] = {
    # Brown et al. 2020, table 2.1
    "gpt3-125m": _MILLION // 2,
    "gpt3-350m": _MILLION // 2,
    "gpt3-760m": _MILLION // 2,
    "gpt3-1.3b": _MILLION,
    "gpt3-2.7b": _MILLION,
    "gpt3-6.7b": 2 * _MILLION,
    "gpt3-13b": 2 * _MILLION,
    "gpt3-175b": 1536 * 2048,
    # Radford et al. 2019, section 2.3: 512 sequences
    **dict.fromkeys(("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"), 512 * 1024),
    # Zhang et al. 2022, table 1
    "opt-1.3b": _MILLION,
    "opt-6.7b": 2 * _MILLION,
    "opt-13b": 4 * _MILLION,
    "opt-30b": 4 * _MILLION,
    "opt-66b": 2 * _MILLION,
    "opt-175b": 2 * _MILLION,
    # Black et al. 2022; Biderman et al. 2023
    "gpt-neox-20b": 1538 * 2048,
    **dict.fromkeys(("pythia-1.4b", "pythia-6.9b", "pythia-12b"), 1024 * 2048),
    # Touvron et al. 2023, table 2; of Llama 2, table 1
    **{name: 4 * _MILLION for name in DECODERS if name.startswith(("llama-", "llama2-"))},
    # Grattafiori et al. 2024: after the last increase
    "llama3-405b": 16 * _MILLION,
    # BigScience 2022, table 3
    "bloom-176b": 2048 * 2048,
    "bloom-7b1": 512 * 2048,
    # Smith et al. 2022; Chowdhery et al. 2022: after the last increase
    "mt-nlg-530b": 1920 * 2048,
    "palm-540b": 2048 * 2048,
    # OLMo Team 2025; Muennighoff et al. 2024
    "olmo2-7b": 1024 * 4096,
    "olmo2-13b": 2048 * 4096,
    "olmo2-32b": 2048 * 4096,
    "olmoe-1b-7b": 1024 * 4096,
    # DeepSeek-AI 2024, section 3.1 and appendix B; of V3, section 4.2; Kimi Team 2025: 67 million tokens
    "deepseek-v2-lite": 4608 * 4096,
    "deepseek-v2": 9216 * 4096,
    "deepseek-v3": 15360 * 4096,
    "kimi-k2": 16384 * 4096,
    # Parmar et al. 2024, table 2; NVIDIA 2024, table 2: after the last increase
    "nemotron4-15b": 1152 * 4096,
    "nemotron4-340b": 2304 * 4096,
    # Devlin et al. 2019: 256 sequences
    "bert-large": 256 * 512,
}
"""Tokens of a step as published, by preset."""
_IMAGES = 256
"""Images of a step of ResNet-50: He et al. 2016, section 3.4."""


def as_published(job: Job) -> tuple[Job, str]:
    """Return the job with a preset's precision and batch where it gives none, and a line that says so; else the job and "".

    The batch is as many samples as hold the published number of tokens, at the job's own sequence length.
    """
    name = job.model.preset
    own_precision = "precision" in job.numerics.model_fields_set
    own_batch = "global_batch" in job.train.model_fields_set
    if name not in PRESETS or (own_precision and own_batch):
        return job, ""
    said = [] if own_precision else ["in bf16"]
    if not own_batch:
        sequence_length = job.data.sequence_length if "sequence_length" in job.data.model_fields_set else None
        samples, words = _batch(str(name), preset(str(name), sequence_length, job.model.config).length)
        job = job.model_copy(update={"train": job.train.model_copy(update={"global_batch": samples})})
        said.append(words)
    if not own_precision:
        job = job.model_copy(update={"numerics": job.numerics.model_copy(update={"precision": "bf16"})})
    keys = ["numerics.precision"] * (not own_precision) + ["train.global_batch"] * (not own_batch)
    return job, f"{job.model.source} is planned {' and '.join(said)}. Change by --set {'=, --set '.join(keys)}="


def _batch(name: str, sequence: int) -> tuple[int, str]:
    """Return the samples of a step of a preset, and their number in words."""
    if name not in DECODERS:
        return _IMAGES, f"with its published {_IMAGES} samples per step"
    tokens = TOKENS.get(name, USUAL_TOKENS)
    samples = max(1, tokens // sequence)
    origin = "its published" if name in TOKENS else "the usual (no published number)"
    return samples, f"with {origin} {tokens / 1e6:.3g}M tokens per step, {samples} sample{'s' * (samples > 1)}"


def preset_records() -> list[dict[str, str | int | None]]:
    """Return what is known of each preset as plain data: its weights, tokens of a sample and of a step."""
    return [
        {
            "source": f"preset:{name}",
            "num_params": preset(name).num_params,
            "tokens_of_a_sample": DECODERS[name].sequence if name in DECODERS else None,
            "tokens_of_a_step": TOKENS.get(name),
        }
        for name in PRESETS
    ]


def presets() -> str:
    """Return a table of the presets: their names as `model.source` takes them, their weights, tokens of a sample and of a step."""
    rows = [("model.source", "weights", "tokens of a sample", "tokens of a step")]
    for name in PRESETS:
        spec = preset(name)
        length = f"{DECODERS[name].sequence:,}" if name in DECODERS else ""
        step = f"{TOKENS[name] / 1e6:.3g}M" if name in TOKENS else ""
        rows.append((f"preset:{name}", f"{spec.num_params / 1e9:.3f}B", length, step))
    return align_columns(rows)
