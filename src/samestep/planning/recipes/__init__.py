"""Layouts in the words of other frameworks: one file for each framework, and what it lacks."""
