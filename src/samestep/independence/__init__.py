"""The proofs: on which samples, tokens and features each value of a forward depends, and which cuts that allows."""
