"""The command line. Each file holds the commands of one purpose; ``main.py`` lists them."""
