"""Measurements that stand behind a claim in the documentation; recorded in `results/`."""
