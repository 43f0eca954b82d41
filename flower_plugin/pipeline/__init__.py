"""Confidant: phones that split one transformer among them and train it as a pipeline."""
