"""Is your own config's result the same everywhere? ``python -m lockstep.parity --help``."""
