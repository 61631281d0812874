"""Makes a plain model directory of files as they are published, where the operator trusts the disk.

No part of what a run trusts or imports: what it writes is a directory of floats like any other.
"""
