"""Sending of compressed contributions to a gradient: one codec a file (the rows are in `program/codecs.py`), and
their exchanges."""
