"""Attention: its form, the carriers that compute it, and the calls and formulas of code in which it is found."""

from samestep.building.attention.attention_spec import AttentionSpec, DroppedWeights
from samestep.building.attention.carriers import AttentionCall, multi_head_attention
from samestep.building.attention.document_mask import DocumentMask

__all__ = ["AttentionCall", "AttentionSpec", "DocumentMask", "DroppedWeights", "multi_head_attention"]
