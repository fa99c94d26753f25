"""The command table of a real Redis 7.4 as data, and the script that captures it."""
