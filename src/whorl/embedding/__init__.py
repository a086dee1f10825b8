"""Text embedders and text classifiers: training and inference."""
