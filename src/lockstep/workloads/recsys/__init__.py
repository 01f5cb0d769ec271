"""Recommendation: ratings by matrix factorisation, rankings by a two-tower network."""
