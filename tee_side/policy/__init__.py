"""Placement policies as data, and what the GPU side learns under each."""
