"""What may cross the trust boundary: messages, tensors on the wire, errors, the channel.

Also the one description of a model directory (`protocol.model`) that both sides must agree on.
This package imports nothing else of the project.
"""
