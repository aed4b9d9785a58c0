"""The decode node: receives K/V into its own paged cache, verifies them, and generates from it."""
