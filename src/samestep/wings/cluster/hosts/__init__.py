"""One run on several hosts, without a launcher: hosts meet at an address, prove a shared secret, and one of them leads."""
