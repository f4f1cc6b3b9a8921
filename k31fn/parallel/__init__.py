"""Sharding annotations and named-axis collectives."""
