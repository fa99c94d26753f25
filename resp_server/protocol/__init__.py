"""The Redis protocol as values: bytes to requests, replies to bytes, a connection's state. No asyncio, no socket."""
