from command_line import head, nightgrid, workplace  # noqa: F401 - fixtures
