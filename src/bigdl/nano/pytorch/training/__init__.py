"""Training processes and faster training steps, shared by Trainer, TorchNano and nano."""
