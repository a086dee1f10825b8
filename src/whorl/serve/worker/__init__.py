"""The engine thread behind the API: model loading, engine state, running sequences."""
