"""`make chaos`: parts of a real cluster are killed, paused, moved and cut under readers that judge."""
