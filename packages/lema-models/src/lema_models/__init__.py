"""Model adapters in plain torch, registered through the ``lema`` entry-point group."""
