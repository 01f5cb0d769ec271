"""Data that is larger than memory: read from files as batches ask for it."""
