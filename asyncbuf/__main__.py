"""``python -m asyncbuf`` is the command ``asyncbuf``."""

import sys

from asyncbuf._cli.main import main

if __name__ == "__main__":
    sys.exit(main())
