"""The engine thread behind the API: model loading, state, requests in flight."""
