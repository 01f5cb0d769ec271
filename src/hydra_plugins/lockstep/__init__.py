"""What Hydra finds of this project by itself: a launcher and a sweeper."""
