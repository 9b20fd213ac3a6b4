"""One optimizer step as plain data: its tasks and ops, its buckets and units, the order of ranks. No torch."""
