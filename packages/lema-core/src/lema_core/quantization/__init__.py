"""Weights in fewer bits: how they lie in files and slots, and how they are read back."""
