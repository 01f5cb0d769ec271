"""Loggers of our own."""
