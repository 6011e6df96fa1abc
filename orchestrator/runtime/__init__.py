"""One run: the driver's loop, its supervisor, its status and where its cards come from."""
