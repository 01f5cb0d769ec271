"""Many runs side by side: ``python -m lockstep.report DIR...``; imports no torch."""
