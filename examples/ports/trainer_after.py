import torch
from project import Text
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import samestep

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
job = samestep.Job(train={"global_batch": 8, "steps": 8}, optimizer={"clip_norm": 1.0})
run = samestep.parallelize(model, "model", optimizer, job=job)
for batch in samestep.batches(DataLoader(Text(), batch_size=8), job):
    print(f"loss {run.step(batch).loss:.6f}")
