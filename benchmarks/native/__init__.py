"""The compiled inner loop of the load generator (`load.pyx`, Linux only)."""
