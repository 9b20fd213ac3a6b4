"""Training over slow links: replicas that exchange their weights rarely (local SGD, DiLoCo), and PowerSGD.

The core trains one replica (`runtime/held_assembly.py`), and sums gradients as they are, in bf16 or in int8 (`program/codecs.py`). The program of
what replicas send is the core's, so that `plan` and `simulate` know it (`program/contributions.py`, `strategies/compress.py`).
"""
