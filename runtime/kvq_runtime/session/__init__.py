"""One user's sequence and what its answers use: drafts, prediction, measurements, saving."""
