"""Episodes: a model and an environment take turns. RL, held-out tasks and agents run them alike."""
