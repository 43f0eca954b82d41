"""Eco-MobiLLM: what a device sends, what the server keeps of it, and what is trained from that."""
