"""The verb `doctor`: what is wrong with the hosts of an allocation, before a run starts on them."""
