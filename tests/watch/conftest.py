"""The browser of the report's tests serves here too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "report"))

from headless_chromium import browser as browser
