"""What model adapters are written with: config.json read in a few lines, rotary embeddings, attention, feed-forward
parts, and the outline of a decoder."""
