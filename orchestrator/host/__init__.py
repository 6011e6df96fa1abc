"""This process and its machine: clocks, standard output and the environment behind a row."""
