"""Compute every displayed number of a comparison from its record."""
