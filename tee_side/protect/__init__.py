"""Hides what leaves, and checks what comes back."""
