"""An S3 server for tests and benchmarks, and a proxy that simulates network failures."""
