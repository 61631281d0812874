"""Products on an NVIDIA GPU: exact kernels in Triton, carried out as CUDA graphs.

Tested on a CPU: the kernels by Triton's interpreter, the rest
with stand-ins for CUDA's objects. None of it has run on a GPU yet (docs/adr/0019).
"""
