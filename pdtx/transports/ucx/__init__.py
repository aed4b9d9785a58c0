"""The mover over UCX: one-sided puts and gets through ctypes, on objects made by ucxx, by ucx-py or by pdtx itself."""
