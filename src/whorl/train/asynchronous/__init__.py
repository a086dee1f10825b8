"""The asynchronous family: workers produce gradients, the server is a learner, and the reader decides who waits for whom."""
