"""What a new user starts with: generated data, models of random weights, a config for a model, the examples."""
