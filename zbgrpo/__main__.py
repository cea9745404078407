"""`python -m zbgrpo`: the same as the console script."""

import sys

from zbgrpo.cli import main

if __name__ == "__main__":
    sys.exit(main())
