"""Measures with a model that is trained on named samples: classifiers of texts, and importance weights."""
