"""Masks: what hides a tensor that leaves the TEE. `mask.py` says what one is."""
