"""From a trained model to its use: test it again, write its predictions, export its network."""
