"""Measurements that the documents quote, and the training of the demo model; not installed."""

import os

# Read once, when torch is imported: the programs have it too (tsqp/run/process.py).
os.environ.setdefault("GOMP_SPINCOUNT", "0")
