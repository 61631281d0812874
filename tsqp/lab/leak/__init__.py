"""The leakage laboratory: what the GPU side can really learn under a policy, measured.

The laboratory plays the GPU side. It records the bytes that reach the service, hands them to every
attack with what is public, and scores what the attacks read against the tokens that were there.
"""
