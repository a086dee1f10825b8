"""Steps of images: sets of images, classifiers, CLIP, captioners."""
