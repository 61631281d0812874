"""Pads made ahead of time: which exist, which were used, and where they are kept.

`store` hands them out once (and has the one in memory), `bank` keeps them in a file, `bank_format`
knows that file's bytes, `maker` makes them, `source` gives them to the micro-batches of a run.
"""
