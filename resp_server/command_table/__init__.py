"""The table of Redis' commands and ours: facts, where keys are, how a command is declared."""
