"""``python -m orchestrator`` does what ``nightgrid`` does."""

import sys

from orchestrator.cli import main

sys.exit(main())
