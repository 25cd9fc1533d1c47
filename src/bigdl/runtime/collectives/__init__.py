"""How the gradients of the workers meet."""
