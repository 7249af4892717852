"""Reads models: checkpoint folders, hub repositories, weights that were quantised before."""
