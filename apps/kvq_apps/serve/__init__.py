"""The HTTP server: routes of OpenAI, Anthropic, Ollama and llama-server over one engine thread."""
