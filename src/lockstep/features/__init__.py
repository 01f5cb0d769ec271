"""What a run can have beside the core, each a file in ``conf/features/``; docs/features.md."""
