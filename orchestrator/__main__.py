"""``python -m orchestrator`` does what ``nightgrid`` does."""

import sys

from orchestrator.cli.main import main

sys.exit(main())
