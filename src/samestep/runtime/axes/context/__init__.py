"""Context parallelism on real modules: slices of sequences, and what their ranks exchange."""
