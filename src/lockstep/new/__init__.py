"""A project of one's own from this one, and later versions of this one for it: docs/upgrading.md."""
