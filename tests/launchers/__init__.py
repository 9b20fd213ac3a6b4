"""Runs that other launchers start: their variables given to processes of this machine, and the launchers that are installed here."""
