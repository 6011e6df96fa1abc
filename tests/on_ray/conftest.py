from command_line import head  # noqa: F401 - a fixture
