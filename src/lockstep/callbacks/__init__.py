"""Callbacks, one idea a file. `lockstep.run.build_here` puts some into every
run; the rest is config."""
