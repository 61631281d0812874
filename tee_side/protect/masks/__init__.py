"""Masks: what hides a tensor that leaves the TEE. One file each; `mask.py` says what one is."""
