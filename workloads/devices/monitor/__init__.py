"""Cards and hosts monitored from outside the process that uses them, with vendors' tools."""
