"""The terminal chat: transcript, history, engine clients, and the app that joins them."""
