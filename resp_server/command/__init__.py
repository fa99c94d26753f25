"""The table of all commands, those of Redis and ours: their facts, their key positions, and their handlers.

The functions of the commands are in `commands`; a `pipeline` runs them.
"""
