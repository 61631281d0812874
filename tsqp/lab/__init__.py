"""The laboratory: benchmarks, leakage, planning, explanations, research masks."""
