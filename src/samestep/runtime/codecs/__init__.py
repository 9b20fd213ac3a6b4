"""What torch does to send contributions to a gradient: one codec a file (the rows are in `program/codecs.py`), and the exchanges of them."""
