"""How processes of a job end, where that tells the operator what to do: the trainers', and 2 for every command here."""

__all__ = ["EXIT_CONFIG", "EXIT_LOST", "EXIT_REFUSED", "EXIT_TERMINATED"]

EXIT_CONFIG = 2
"""Bad input: starting again does not help."""
EXIT_LOST = 75
"""This replica has to start again and catch up from the others."""
EXIT_REFUSED = 77
"""The coordinator turned this replica away: a newer attempt of it runs, or the key or its certificate is wrong."""
EXIT_TERMINATED = 143
"""Told to stop, and not done in time."""
