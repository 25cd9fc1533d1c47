"""Training loop of Keras models, for every engine and type of input."""
