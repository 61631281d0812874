"""`tsqp bench`: where each microsecond and byte of a step goes."""

import os

# Read once, when torch is imported: the programs have it, too (tsqp/run/process.py).
os.environ.setdefault("GOMP_SPINCOUNT", "0")
