"""Codecs that keep training's states in 8 bits, registered through the ``lema`` entry-point group."""
