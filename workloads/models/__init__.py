"""Models: which there are, how a loadable directory of one is made, and what is inside it."""
