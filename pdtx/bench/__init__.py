"""What `pdtx bench` measures: tiers against the machine's limit, and what a trace finds in tiers of some sizes."""
