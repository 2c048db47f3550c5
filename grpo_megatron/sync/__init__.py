"""The weight sync: from any training layout to any rollout layout, with the fewest bytes. Knows names and shapes only."""
