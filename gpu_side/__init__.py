"""The untrusted side: holds the weights, multiplies, and answers requests.

It learns whatever the TEE's placement policy lets it see, and nothing here is trusted by the TEE.
"""
