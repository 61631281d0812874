"""Masks and policies that are weak on purpose, each the control of an attack: never use them."""
