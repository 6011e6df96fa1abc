"""Cards and hosts looked at from outside: vendors' tools, and what follows from what they say."""
