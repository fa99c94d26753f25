"""The table of Redis' commands and ours: facts, where their keys are, and how a command is declared.

The commands' bodies are in `commands`; `execution` runs them.
"""
