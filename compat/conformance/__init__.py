"""Compares a server with a real Redis, byte for byte, over TCP; only `dataset_log` imports the code under test."""
