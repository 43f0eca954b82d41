"""Federated fine-tuning of transformers on phones, as a Flower plugin."""
