"""The shipped test kit: conformance suites that a new layout or store runs. Nothing else that is shipped imports it."""
