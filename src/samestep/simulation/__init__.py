"""A step played on a clock: seconds, bytes and a timeline, predicted from its program without running it."""
