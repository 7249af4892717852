"""The terminal chat: transcript, history, clients of an engine, and the app that joins them."""
