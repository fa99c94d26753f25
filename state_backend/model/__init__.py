"""The words of all other rooms: states, keys and their slots, changes, generations, the errors and the clock.

No file, no store and no byte layout but a change's: those are in `log`, `store` and `codec`.
"""
