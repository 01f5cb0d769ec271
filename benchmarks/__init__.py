"""What lockstep itself costs: ``python -m benchmarks``. Nothing timed here is a test."""
