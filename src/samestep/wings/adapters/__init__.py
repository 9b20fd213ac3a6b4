"""The wing `adapters`: low-rank adapters by peft (LoRA), and frozen weights in 4 bits (QLoRA).

lora.py    adapters in a model, their names in peft's modules and files, and the model into whose weights they are added
nf4.py     how a weight in 4 bits is rounded and held, and the product with it

The core asks for both through `building/model_changes.py`.
"""
