"""BAdam for lema, registered through the ``lema`` entry-point group."""
