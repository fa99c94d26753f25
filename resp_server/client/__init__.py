"""One client's connection: its bytes, its turns, what waits to be sent."""
