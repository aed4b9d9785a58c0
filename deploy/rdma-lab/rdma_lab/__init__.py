"""Two virtual machines with Soft-RoCE, out of QEMU, a kernel package of Debian's and the host's own files.

Nothing but Python's own library: it runs before anything is installed.
"""
