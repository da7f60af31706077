"""What a model file says about itself, read without downloading it."""
