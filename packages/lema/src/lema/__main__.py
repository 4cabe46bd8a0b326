"""``python -m lema``."""

import sys

from lema.cli import main

sys.exit(main(sys.argv[1:]))
