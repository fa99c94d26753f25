"""State as bytes: descriptors, the change log, stores. Knows neither Redis replies nor Spark."""
