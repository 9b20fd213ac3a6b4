"""The prediction of a step from its program, without running it: seconds, bytes and a timeline. No torch."""
