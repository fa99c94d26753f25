"""`make chaos`: processes of a real cluster are killed, paused, moved and disconnected while readers check replies."""
