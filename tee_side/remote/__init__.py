"""Operators that leave the TEE: how they are asked for, of which services, and who is believed."""
