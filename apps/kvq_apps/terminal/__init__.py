"""Input from and output to the terminal."""
