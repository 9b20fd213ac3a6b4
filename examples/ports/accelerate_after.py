import torch
from project import Net, Spirals
from torch import nn
from torch.utils.data import DataLoader

import samestep

job = samestep.Job(train={"global_batch": 64, "steps": 8}, optimizer={"clip_norm": 1.0})
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
loader = DataLoader(Spirals(), batch_size=64)
criterion = nn.CrossEntropyLoss()
run = samestep.parallelize(model, criterion, optimizer, job=job)
for batch in samestep.batches(loader, job):
    report = run.step(batch)
    scheduler.step()
    print(f"loss {report.loss:.6f}")
run.save("trained")
