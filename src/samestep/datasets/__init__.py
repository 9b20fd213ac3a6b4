"""Datasets and batches: the samples of step k are a function of (seed, k) alone, in every layout and after any resume.

```
open_dataset(job) ── map-style dataset ──► batches(dataset, job) ── indices of each step ──► shares(...) of one rank
                                                                                                │
                                   tensors with the batch dimension first ◄── read_samples(dataset, share)
```
There is no iterator state: to resume, `batches` takes another first step. Nothing here depends on process groups or devices.
"""

from samestep.datasets.batch import Batch, BatchStream, Dataset, blame_samples, example_of, shares
from samestep.datasets.opening import batches
from samestep.datasets.order import permute_positions, sample_indices
from samestep.datasets.reading import read_samples
from samestep.datasets.source import (
    classes_of,
    kind_of,
    of_held_out,
    of_words,
    open_dataset,
    open_held_out,
    remarks_on,
    token_ranges,
)
from samestep.datasets.tokenizers import Tokenizer, open_tokenizer

__all__ = [
    "Batch",
    "BatchStream",
    "Dataset",
    "Tokenizer",
    "batches",
    "blame_samples",
    "classes_of",
    "example_of",
    "kind_of",
    "of_held_out",
    "of_words",
    "open_dataset",
    "open_held_out",
    "open_tokenizer",
    "permute_positions",
    "read_samples",
    "remarks_on",
    "sample_indices",
    "shares",
    "token_ranges",
]
