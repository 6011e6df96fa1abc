"""A served model under load: servers, the load on them, the client that measures, its figures."""
