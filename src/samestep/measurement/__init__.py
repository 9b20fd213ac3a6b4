"""This machine in figures: microbenchmarks, the hardware profile made of them, and steps measured to refit it."""
