import torch
from project import Text, small_llama
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

import samestep

torch.manual_seed(0)
model = LlamaForCausalLM(small_llama())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
job = samestep.Job(train={"global_batch": 8, "steps": 8}, optimizer={"clip_norm": 1.0})
run = samestep.parallelize(model, "model", optimizer, job=job)
for batch in samestep.batches(DataLoader(Text(), batch_size=8), job):
    print(f"loss {run.step(batch).loss:.6f}")
