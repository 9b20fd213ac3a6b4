"""Dropout whose masks are functions of the seed, the step, the call and the sample."""
