"""The programs: one module for each, from options to the end."""
