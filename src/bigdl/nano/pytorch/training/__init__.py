"""What Nano's Trainer, TorchNano and nano share: processes, settings that make steps faster."""
