"""The verb `train`: the checks before a run, the loop over its steps, and the files that it writes."""
