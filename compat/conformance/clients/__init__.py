"""A script per real client. It runs as a process, executes `matrix`'s features, and prints the results as JSON."""
