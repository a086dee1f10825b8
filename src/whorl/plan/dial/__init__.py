"""From a law and a budget to a prediction: budgets in dollars, the probe of a text, the prediction, and its audit."""
