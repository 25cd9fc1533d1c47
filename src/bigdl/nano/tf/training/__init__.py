"""Training of Keras models in several processes of one machine."""
