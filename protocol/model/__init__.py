"""What both sides read from a model directory, and must agree on: sizes, names, tensors.

Nothing here crosses the wire, and nothing here believes the peer: each side reads its own copy.
"""
