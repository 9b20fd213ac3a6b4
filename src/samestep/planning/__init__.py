"""Choosing a layout: every candidate, what throws it out, what it is predicted to take, and the ranking."""
