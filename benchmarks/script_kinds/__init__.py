"""Kinds of single-device training scripts, each as a plain loop and as its port: what `benchmarks/scripts.py` runs."""
