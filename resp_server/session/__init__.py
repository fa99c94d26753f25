"""What a server knows of one connection: who it is, its transaction, its subscriptions, what it tracks."""
