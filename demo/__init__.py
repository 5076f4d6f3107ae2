"""The demo model: a small trained Mixture-of-Experts model, as package data in `model/`."""
