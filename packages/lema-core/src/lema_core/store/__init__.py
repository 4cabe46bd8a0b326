"""Tensor streams: granules in slots, moved as a traced and planned step needs them."""
