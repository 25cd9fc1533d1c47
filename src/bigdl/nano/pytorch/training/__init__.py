"""Processes and faster steps, which Nano's Trainer, TorchNano and nano share."""
