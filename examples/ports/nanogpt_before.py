import torch
from project import GPT, Text

gradient_accumulation_steps, batch_size, block_size, max_iters = 2, 4, 16, 8
data = Text(256).tokens.flatten()
generator = torch.Generator().manual_seed(0)


def get_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    ix = torch.randint(len(data) - block_size, (size,), generator=generator).tolist()
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


model = GPT()
optimizer = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95))
for _ in range(max_iters):
    total = 0.0
    for _ in range(gradient_accumulation_steps):
        X, Y = get_batch(batch_size)
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        total += loss.item()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"loss {total:.6f}")
