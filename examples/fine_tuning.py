"""Fine-tuning with LoRA: adapters are trained beside the frozen weights of a folder of transformers, in any layout.

python examples/fine_tuning.py                 two workers, replicas
python examples/fine_tuning.py "dp=2 zero=3"   the same losses
A tiny new Llama stands for the folder that you would take: nothing is downloaded.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import samestep

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

if __name__ == "__main__":
    layout = sys.argv[1] if len(sys.argv) > 1 else "dp=2"
    with tempfile.TemporaryDirectory() as folder:
        base, trained, adapters = (Path(folder) / name for name in ("base", "trained", "adapters"))
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(base)
        job = samestep.Job(
            model={"source": f"hf:{base}", "lora": {"targets": ["q_proj", "v_proj"], "r": 8, "alpha": 16.0}},
            data={"source": "topics"},  # help texts of Python; jsonl:PATH and hf:PATH read your own
            train={"global_batch": 16, "steps": 20, "sample_tokens": 0, "evaluate_samples": 32},
            optimizer={"lr": 1e-2},
        )
        samestep.train(job, layout=layout, out=trained)
        samestep.export(trained, adapters)  # the adapters alone, a few kB
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapters)
        print(f"peft loads {sum(p.numel() for n, p in model.named_parameters() if 'lora_' in n):,} weights of adapters")
