"""One rank of a pipeline: its stage, the tensors that it passes on, and its messages."""
