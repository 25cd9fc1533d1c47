"""Vision for PyTorch: backbones and classifiers."""
