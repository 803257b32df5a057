"""How does the cost of a step grow as the work grows?"""
