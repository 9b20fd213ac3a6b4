import torch
from project import Net, Spirals
from torch import nn
from torch.utils.data import DataLoader

import samestep

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(Spirals(), batch_size=64)
criterion = nn.CrossEntropyLoss()
job = samestep.Job(train={"global_batch": 64, "steps": 8}, optimizer={"clip_norm": 1.0})
run = samestep.parallelize(model, criterion, optimizer, job=job)
for batch in samestep.batches(loader, job):
    report = run.step(batch)
    print(f"loss {report.loss:.6f}")
