"""Attacks that ship with us, one concept a file; found by `tsqp.lab.leak.registry`."""
