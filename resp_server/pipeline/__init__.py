"""From requests to replies, whatever backend answers: admission, order, EXEC and WATCH, long requests, effects.

`immediate` is the pipeline of a backend that replies at once, `batched` of one that sends requests on. The commands
themselves are in `commands`; `client` reads and writes the connection's bytes.
"""
