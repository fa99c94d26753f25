"""From requests to replies: the context that commands run in, the dispatcher, EXEC and WATCH."""
