"""The mover over NIXL, which wraps UCX and other libraries; needs the extra nixl."""
