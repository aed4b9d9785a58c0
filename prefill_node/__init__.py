"""The prefill node: computes prompts and ships their K/V, layer by layer."""
