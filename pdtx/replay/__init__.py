"""Traces and captures, run through the same machinery as real prompts, with prefill that only takes as long."""
