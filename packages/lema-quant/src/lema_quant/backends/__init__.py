"""Backends whose bytes come from other libraries. Each is imported inside the call that needs it, and nowhere else."""
