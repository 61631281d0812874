"""The compiled path: kernels of the TEE, and their bindings to tensors.

Sources of what both sides use, and of the module itself, are in `protocol/native`.
"""
