"""The asynchronous family: workers produce gradients, the server is a learner, and the reader is the method."""
