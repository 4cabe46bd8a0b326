"""Weights in FP8 for lema, registered through the ``lema`` entry-point group."""
