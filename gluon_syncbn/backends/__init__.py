"""What a layer is made of."""
