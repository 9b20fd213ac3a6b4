import torch
from project import Text, small_llama
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
model = LlamaForCausalLM(small_llama())
arguments = TrainingArguments(
    "trained",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=8,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    weight_decay=0.0,
    max_grad_norm=1.0,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    train_sampling_strategy="sequential",
)
Trainer(model, arguments, train_dataset=Text()).train()
