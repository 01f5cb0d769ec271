"""A project of one's own from this one, and its later versions for it: docs/upgrading.md."""
