"""`python -m rlstruct` is `rlstruct`."""

import sys

from rlstruct.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
