"""The training loop of Keras models, whoever starts the workers and whatever the input is."""
