"""The reference trainer: a language model on islands, built on the public API alone."""
