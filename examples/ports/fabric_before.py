import torch
from lightning.fabric import Fabric
from project import Net, Spirals
from torch import nn
from torch.utils.data import DataLoader

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(Spirals(), batch_size=32))
criterion = nn.CrossEntropyLoss()
for points, labels in loader:
    optimizer.zero_grad()
    loss = criterion(model(points), labels)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    fabric.print(f"loss {fabric.all_reduce(loss).item():.6f}")
