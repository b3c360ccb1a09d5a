"""`python -m services.launch`: the same as `counterpoint`."""

import sys

from services.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
