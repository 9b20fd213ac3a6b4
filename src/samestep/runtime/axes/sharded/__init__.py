"""Sharded weights of ZeRO-2 and ZeRO-3, by FSDP2."""
