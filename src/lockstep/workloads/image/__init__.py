"""Image classification: data sets, augmentation that follows from the sample, networks."""
