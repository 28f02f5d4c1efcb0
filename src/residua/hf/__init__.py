"""Conversion of Hugging Face checkpoints. Nothing here imports transformers before it is used."""
