"""The HTTP server: OpenAI's and llama-server's routes over one engine thread."""
