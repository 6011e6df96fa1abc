from command_line import nightgrid, workplace  # noqa: F401 - fixtures
