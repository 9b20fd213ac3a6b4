"""Bytes of a rank at each moment of a step, predicted from the program."""
