"""What a run needs from its machines, looked at before a run does."""
