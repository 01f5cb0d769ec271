"""dp, which Lightning does not have, and what its ddp and ddp_spawn lack."""
