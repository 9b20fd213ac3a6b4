"""Gradients in float16 (`half.py`)."""

from __future__ import annotations

import torch

from samestep.runtime.codecs.codec import Codec
from samestep.runtime.codecs.half import Half


def codec() -> Codec:
    """Return the codec."""
    return Half(torch.float16)
