"""What torch does to send gradients: one codec a file (the rows are in `program/codecs.py`)."""
