"""What a rank of a pipeline does: its stage, what it passes on, its messages."""
