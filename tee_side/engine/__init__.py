"""Sequences, steps, sampling, text in and out."""
