"""The search for the best plan, with its bound."""
