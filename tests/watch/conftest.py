"""The browser of the report's tests serves here too."""

import sys
from pathlib import Path

from command_line import nightgrid, workplace  # noqa: F401 - fixtures

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "report"))

from headless_chromium import browser as browser
