"""Pads made ahead of time: which exist, which were used, and where they are kept.

`store` hands them out once (and has the one in memory), `bank` keeps them on disk, `bank_files` has
that one's files and bytes, `source` makes them and gives them to the micro-batches of a run, and
`background_maker` has them made beside it.
"""
