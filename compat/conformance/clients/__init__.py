"""A script per real client: runs in a process of its own, does what `matrix` asks, prints what it saw as JSON."""
