"""The trusted side: the forward pass, the KV cache, sampling, placement, and every secret.

With `protocol` it is the trusted computing base. It never imports `gpu_side` or `tsqp`.
"""
