"""Hold the proof of being Redis-compatible: reference data, deviations, conformance runs. Not shipped."""
