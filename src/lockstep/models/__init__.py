"""Networks: plain torch modules that know nothing of training, strategies or configs."""
