"""Native kernels for lema. ``csrc/include/lema.h`` is what the library offers; ``lema_cuda.plugin`` registers it."""
