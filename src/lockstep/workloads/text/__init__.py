"""Text on what every machine has: the sources of Python's standard library."""
