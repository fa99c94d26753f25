"""Compare a server with a real Redis, byte for byte, over TCP alone: only `dataset_log` imports what is judged."""
