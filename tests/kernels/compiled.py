"""Compile each kernel for two kinds of GPUs, and look at what it became. Run by `tests/unit/test_kernels.py`."""

from __future__ import annotations

import inspect
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from samestep.kernels import hashed_dropout

TARGETS = (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32))
_POINTERS = {"halves": "*i32", "columns": "*i32", "dropped": "*i1"}


def compiled(kernel: Any, target: GPUTarget, types: dict[str, str], tile: dict[str, int], **options: Any) -> str:
    """Return the text that a kernel becomes on a target; arguments of no given type are int32."""
    names = inspect.signature(kernel.fn).parameters
    signature = {name: "constexpr" if name in tile else types.get(name, "i32") for name in names}
    source = ASTSource(
        fn=kernel, signature=signature, constexprs={(list(names).index(name),): n for name, n in tile.items()}
    )
    made = triton.compile(source, target=target, options=options)
    assert made.asm["cubin"]
    text: str = made.asm["ptx"]
    return text


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        for target in TARGETS:
            tile = {"ROWS": 2, "COLUMNS": 1024}
            for kind in ("fp32", "bf16", "fp16", "fp64"):
                given = {"x": f"*{kind}", "y": f"*{kind}", "scale": "i64", **_POINTERS}
                text = compiled(hashed_dropout.drop_and_scale, target, given, tile)
                assert ".local" not in text, "it has no room for its numbers"
            compiled(hashed_dropout.write_mask, target, _POINTERS, tile)


if __name__ == "__main__":
    main()
