from command_line import nightgrid  # noqa: F401 - a fixture
