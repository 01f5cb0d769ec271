"""Strategies that Lightning does not have. Importing one registers its name."""
