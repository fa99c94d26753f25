"""A script per program: it uses the program as an application does, and prints a line of JSON for each check."""
