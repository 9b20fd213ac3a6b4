"""The output of the verbs: text tables for a terminal, and files that are written for the user."""
