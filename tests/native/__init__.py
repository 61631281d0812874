"""Compiled kernels without Python, under sanitizers."""
