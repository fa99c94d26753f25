"""The command `sparkis`, also as `python -m sparkis`."""

import sys

from spark_hooks.cli import main

if __name__ == "__main__":
    sys.exit(main())
