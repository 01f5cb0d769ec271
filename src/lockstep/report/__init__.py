"""Many runs side by side: ``python -m lockstep.report DIR...``. Reads files, imports no torch."""
