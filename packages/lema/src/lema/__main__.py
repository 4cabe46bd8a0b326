"""``python -m lema``."""

import os
import sys

# Before torch is loaded: its idle threads sleep. By default they spin for milliseconds, which takes a core from whoever
# computes next, be that native kernels, the transfer engine's threads or another program.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from lema.cli import main

sys.exit(main(sys.argv[1:]))
