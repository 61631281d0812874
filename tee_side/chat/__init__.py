"""Conversations: what a model reads of them, and what of its text is an answer, or a call."""
