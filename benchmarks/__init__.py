"""Measurements that pdtx is held to, each beside a reference taken in the same run."""
