"""The legal layouts of a number of devices, and why others are not."""
