"""Drafters propose tokens for the runtime to verify. The package holds none yet."""
