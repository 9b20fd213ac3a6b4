"""Recording where the time of steps goes: marks in the runtime, which cost a test of one variable while nobody listens, and the
recorder that hears them."""
