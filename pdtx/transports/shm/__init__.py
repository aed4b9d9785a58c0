"""The mover within one host: whoever gets the bytes copies them, once, straight out of the other node's memory.

Three ways, by how the other node has its memory: shared memory is mapped here; private memory is read by the kernel
(cross memory attach); a CUDA device's is opened through its driver. Nobody ever writes into the other's memory, and
into what is mapped nobody could. This is never a network's figure.
"""
