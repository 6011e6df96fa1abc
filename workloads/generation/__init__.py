"""Generation loops of our own, where a library's loop leaves a card doing what nobody asked for."""
