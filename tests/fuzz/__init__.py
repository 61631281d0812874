"""Fuzzing of everything that reads bytes which somebody else may have written."""
