"""The forward pass, and the operators that it computes in the TEE."""
