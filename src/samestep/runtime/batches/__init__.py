"""Batches as the loop of a run hands them over: those of `samestep.batches`, or the values of one."""
