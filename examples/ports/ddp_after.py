import torch
from project import Net, Spirals
from torch import nn
from torch.utils.data import DataLoader

import samestep

dataset = Spirals()
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
loader = DataLoader(dataset, batch_size=64)
job = samestep.Job(train={"global_batch": 64, "steps": 16}, optimizer={"clip_norm": 1.0})
run = samestep.parallelize(model, criterion, optimizer, job=job)
for batch in samestep.batches(loader, job):
    report = run.step(batch)
    print(f"loss {report.loss:.6f}")
