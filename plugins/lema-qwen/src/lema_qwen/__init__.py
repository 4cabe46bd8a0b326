"""Qwen2 and Qwen3 for lema, registered through the ``lema`` entry-point group."""
