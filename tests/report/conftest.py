from command_line import nightgrid  # noqa: F401 - a fixture
from headless_chromium import browser  # noqa: F401 - a fixture
