"""Triton's compiler takes the kernels for CUDA devices, on which none of these tests runs, within the shared memory that all of them have."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from samestep.kernels import flash_launches

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
LEAST_SHARED = 99 * 2**10
"""Bytes of a block's shared memory on devices of compute capability 8.6, 8.9 and 12.0; others have more."""
FORMS: tuple[dict[str, Any], ...] = (
    {"IS_CAUSAL": True, "WINDOW": 0, "MASK": "", "HAS_DOCUMENTS": False},
    {"IS_CAUSAL": False, "WINDOW": 100, "MASK": "bool", "HAS_DOCUMENTS": True},
    {"IS_CAUSAL": True, "WINDOW": 100, "MASK": "added", "HAS_DOCUMENTS": False},
)
CASES = [
    *(("bf16", 128, form, 80) for form in FORMS[1:]),
    *((dtype, width, FORMS[0], capability)
      for dtype in ("bf16", "fp16", "fp32") for width in (64, 128, 256) for capability in (80, 90)),
]  # fmt: skip
_OF_INPUTS = ("q", "k", "v", "out", "given", "dq", "dk", "dv")
_TYPES = {
    "halves": "*i32", "hashed_columns": "*i32", "documents": "*i64", "lse": "*fp32", "delta": "*fp32", "scale": "fp32", "times": "fp32"
}  # fmt: skip
_OF_MASK = {"": "*fp32", "bool": "*u8", "added": "*fp32"}


def shared_bytes(
    kernel: Any, dtype: str, words: dict[str, Any], blocks: flash_launches._Blocks, capability: int
) -> int:
    """Compile a kernel, and return the bytes of shared memory that a block of threads has."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    words = {**words, "ROWS": blocks.queries, "COLUMNS": blocks.keys}
    words = {name: word for name, word in words.items() if name in kernel.arg_names}
    types = {**dict.fromkeys(_OF_INPUTS, f"*{dtype}"), **_TYPES, "mask": _OF_MASK[words.get("MASK", "")]}
    signature = {name: "constexpr" if name in words else types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): word for name, word in words.items()})
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    return int(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared)


@needs_triton
@pytest.mark.nightly
@pytest.mark.parametrize(("dtype", "width", "form", "capability"), CASES)
def test_kernels_of_attention_compile(
    dtype: str, width: int, form: dict[str, Any], capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from samestep.kernels import flash_dropout

    sizes = (flash_launches._FULL if dtype == "fp32" else flash_launches._HALF)[width]
    words = {
        "HEADS": 8,
        "GROUP": 2,
        "D": width,
        "E": width,
        "PADDED_D": width,
        "PADDED_E": width,
        "PRECISION": "ieee",
        **form,
    }
    kernels = {
        flash_dropout.forward_kernel: sizes.forward,
        flash_dropout.query_gradients_kernel: sizes.of_queries,
        flash_dropout.key_gradients_kernel: sizes.of_keys,
    }
    for kernel, blocks in kernels.items():
        assert 0 < shared_bytes(kernel, dtype, words, blocks, capability) <= LEAST_SHARED
    rows = flash_launches._Blocks(32, 32, 4, 1)
    assert shared_bytes(flash_dropout.products_kernel, dtype, words, rows, capability) <= LEAST_SHARED
