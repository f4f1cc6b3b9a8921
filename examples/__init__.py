"""Short, tested examples; the README shows them."""
