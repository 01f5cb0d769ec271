"""PNG files beside ``metrics.csv``, and in the loggers that show pictures: ``plots=true``."""
