import torch
from accelerate import Accelerator
from project import Net, Spirals
from torch import nn
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
loader = DataLoader(Spirals(), batch_size=64)
criterion = nn.CrossEntropyLoss()
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for points, labels in loader:
    loss = criterion(model(points), labels)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    accelerator.print(f"loss {accelerator.gather(loss).mean().item():.6f}")
accelerator.save_model(model, "trained")
