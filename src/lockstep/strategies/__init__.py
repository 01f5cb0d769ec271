"""Strategies that Lightning does not have; importing a module of this package registers its name."""
