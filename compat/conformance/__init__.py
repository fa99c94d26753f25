"""Compare a server with a real Redis, byte for byte, over TCP alone: nothing here imports what it judges."""
