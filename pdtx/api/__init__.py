"""The functions that `import pdtx` offers over everything below; see docs/python.md."""
