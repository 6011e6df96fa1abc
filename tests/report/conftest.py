"""A browser for tests of the page."""

from headless_chromium import browser as browser
