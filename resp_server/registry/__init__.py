"""Who of several state servers owns which slots: decided in one process, which is never asked when a key is read."""
