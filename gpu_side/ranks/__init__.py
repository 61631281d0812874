"""One service of several processes (`gpu-service --tensor-parallel`).

The head (rank 0) is the service. It sends every product with a weight to the other ranks; each
computes its part of the output columns, and the head puts them side by side. Nothing is added up,
so integers are those of one process, bit for bit.

Ranks are processes of torch.distributed. Requests arrive and replies leave in host memory, so gloo
carries them, also where each rank computes on a GPU of its own.
"""
