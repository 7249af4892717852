"""From a Hugging Face checkpoint to a bundle."""
