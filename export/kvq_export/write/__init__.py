"""Writes bundles: graph, layout, weights, a folder that appears whole or not at all."""
