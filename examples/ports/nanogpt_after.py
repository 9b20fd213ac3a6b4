import torch
from project import GPT, Text

import samestep

batch_size, block_size, max_iters = 8, 16, 8
data = Text(256).tokens.flatten()
generator = torch.Generator().manual_seed(0)


def get_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    ix = torch.randint(len(data) - block_size, (size,), generator=generator).tolist()
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


model = GPT()
optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
job = samestep.Job(train={"global_batch": batch_size, "steps": max_iters}, optimizer={"clip_norm": 1.0})
run = samestep.parallelize(model, "model", optimizer, job=job)
for _ in range(max_iters):
    X, Y = get_batch(batch_size)
    report = run.step({"idx": X, "targets": Y})
    print(f"loss {report.loss:.6f}")
