"""The proof of Redis compatibility: reference data, deviations, conformance runs, fuzzing. Not shipped."""
