"""Masks that are known to be broken, with the keys and weights that some need: baselines."""
