import torch
import torch.distributed as dist
from project import Net, Spirals
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group()
dataset = Spirals()
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
sampler: DistributedSampler[tuple[torch.Tensor, torch.Tensor]] = DistributedSampler(dataset, shuffle=False)
loader = DataLoader(dataset, batch_size=64 // dist.get_world_size(), sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for points, labels in loader:
        loss = criterion(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        dist.all_reduce(loss.detach().div_(dist.get_world_size()))
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.6f}")
dist.destroy_process_group()
