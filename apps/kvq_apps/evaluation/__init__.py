"""Quality at a KV setting: what each task asks and how it is scored. Knows no flag, no terminal."""
