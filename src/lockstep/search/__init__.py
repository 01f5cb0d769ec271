"""Search with Optuna: ``hydra/sweeper=optuna``. Imports no torch; the extra is ``search``."""
