"""``python -m nightgrid COMMAND``: the command line."""

import sys

from orchestrator.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
