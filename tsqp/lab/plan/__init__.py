"""Predicts what a deployment would do, from a few measured layers and described hardware."""
