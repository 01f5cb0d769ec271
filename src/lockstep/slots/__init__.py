"""Several jobs of a sweep at once, each on devices of its own: ``hydra/launcher=slots``."""
