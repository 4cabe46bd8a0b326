"""Figures before a run: what a machine can do, how long a step will take on it, and what more memory would buy."""
